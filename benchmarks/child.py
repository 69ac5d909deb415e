"""A child process that holds one object and calls its methods on request: JSON lines over its stdin and stdout.

The parent waits for every answer, so of parent and children only one works at a time, and repetitions of all of them
can be interleaved in one run. This module imports only the standard library: the child may live in any environment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]


class Child:
    """maker: "module:function", called in the child with `settings`; its result is the object that is asked."""

    def __init__(self, python: str | Path, maker: str, **settings: Any) -> None:
        self.maker = maker
        arguments = [str(python), "-m", "benchmarks.child", maker, json.dumps(settings)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on exit
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT
        )
        self._answer()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def call(self, method: str, **arguments: Any) -> Any:
        """The result of one method of the child's object."""
        self.process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.log.seek(0)
            tail = self.log.read()[-2000:]
            raise RuntimeError(f"the child {self.maker} ended with code {code} (-9: out of memory?): {tail}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"in the child {self.maker}: {answer['error']}")
        return answer["result"]


def serve(maker: str, settings: dict[str, Any], requests: TextIO, answers: TextIO) -> None:
    """The child's side: make the object, say so, and answer until stdin ends."""

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        module, function = maker.split(":")
        subject = getattr(importlib.import_module(module), function)(**settings)
        answer(result=None)
        for line in requests:
            request = json.loads(line)
            answer(result=getattr(subject, request["method"])(**request["arguments"]))
    except Exception:
        answer(error=traceback.format_exc())


if __name__ == "__main__":
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    serve(sys.argv[1], json.loads(sys.argv[2]), sys.stdin, protocol)
