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
        entries = list(_entries(importlib.import_module(name), name))
        if entries:
            yield "\n\n".join(entries) + "\n", f"{name} (documentation)"


def _entries(thing: Any, name: str) -> Iterator[str]:
    """What a module or class says about itself and its public members, in alphabetical order."""
    members = dict(vars(thing))
    if isinstance(members.get("__doc__"), str):
        yield f"{name}\n{'=' * len(name)}\n{inspect.cleandoc(members['__doc__'])}"
    for member, value in sorted(members.items()):
        if member.startswith("_") or _written_in_python(value):
            continue
        if inspect.isclass(value) and inspect.ismodule(thing):
            yield from _entries(value, f"{name}.{member}")
        elif inspect.isroutine(value) and isinstance(value.__doc__, str):
            yield f"{name}.{member}\n{inspect.cleandoc(value.__doc__)}"


def _written_in_python(thing: Any) -> bool:
    """What a running program has put into a compiled module is no part of the corpus."""
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    return any(inspect.isfunction(member) for member in members)


def _root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])
