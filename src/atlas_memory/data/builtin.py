"""The standard library of the running Python as text: its sources, and the documentation of what is written in C."""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Other people's packages, and tests, which some systems leave out: what is left is the same everywhere.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def version() -> str:
    return sys.version


def files() -> list[Path]:
    root = _root()
    return sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))


def sources() -> Iterator[tuple[str, str]]:
    """(text, name) of every module written in Python; `pydoc_data/topics.py` holds the language reference."""
    root = _root()
    for path in files():
        with tokenize.open(path) as file:  # in the encoding the file declares
            yield file.read(), path.relative_to(root).as_posix()


def documentation() -> Iterator[tuple[str, str]]:
    """(text, name) of every module compiled into the interpreter: their documentation is in no source file."""
    for name in sorted(sys.builtin_module_names):
        module = importlib.import_module(name)
        yield "\n\n".join(_entries(module, name)) + "\n", f"{name} (documentation)"


def _entries(thing: Any, name: str) -> Iterator[str]:
    text = inspect.cleandoc(documented) if isinstance(documented := _own(thing).get("__doc__"), str) else ""
    if text:
        yield f"{name}\n{'=' * len(name)}\n{text}"
    for member, value in sorted(_own(thing).items()):
        if member.startswith("_") or inspect.ismodule(value):
            continue
        if inspect.isclass(value) and inspect.ismodule(thing):
            yield from _entries(value, f"{name}.{member}")
        elif callable(value) and isinstance(getattr(value, "__doc__", None), str):
            yield f"{name}.{member}\n{inspect.cleandoc(value.__doc__)}"


def _own(thing: Any) -> dict[str, Any]:
    return dict(vars(thing))


def _root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])
