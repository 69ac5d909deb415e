"""Folders that are there in full or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Write to a temporary neighbour, which becomes `folder` at the end; after an exception `folder` is as it was.

    One writer at a time: the neighbour of a writer that was killed is removed by the next one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = unfinished(folder)
    _remove(temporary)
    temporary.mkdir()
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            synchronise(path)
        synchronise(temporary)
        _remove(folder)
        temporary.rename(folder)
        synchronise(folder.parent)
    finally:
        _remove(temporary)


def unfinished(folder: Path) -> Path:
    """Where `replace_folder` gathers what will be `folder`."""
    return folder.parent / f".{folder.name}.unfinished"


def synchronise(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
