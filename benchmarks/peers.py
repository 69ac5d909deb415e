"""The peers' own environment: benchmarks/.peers-venv, made on first use. The library never depends on a peer."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child
from benchmarks.registry import NotAvailableError

ENVIRONMENT = ROOT / "benchmarks" / ".peers-venv"
PYTHON = ENVIRONMENT / "bin" / "python"
REQUIREMENTS = ("torch==2.13.0", "titans-pytorch==0.5.5")


def titans_pytorch(maker: str = "layer", **settings: Any) -> Child:
    """A child that holds the peer's layer: see `titans_peer.py` for makers and settings."""
    return Child(_python(), f"benchmarks.titans_peer:{maker}", **settings)


@functools.cache
def _python() -> Path:
    """The environment's interpreter. Installed once per environment, tried once per run."""
    stamp = ENVIRONMENT / f".installed-{'-'.join(REQUIREMENTS)}"
    if not stamp.is_file():
        _command(sys.executable, "-m", "venv", str(ENVIRONMENT))
        _command(str(PYTHON), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *REQUIREMENTS)
        stamp.touch()
    return PYTHON


def _command(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotAvailableError(f"peer not available: {' '.join(arguments[1:4])} … said: {last}")
