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

    At no moment are both the old and the new one gone: the old one is set aside until the new one has its name. One
    writer at a time: what a writer that was killed has left, the next one puts right (`recover`).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    recover(folder)
    temporary = unfinished(folder)
    _remove(temporary)
    temporary.mkdir()
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            synchronise(path)
        synchronise(temporary)
        _put_in_place(temporary, folder)
    finally:
        _remove(temporary)


def _put_in_place(new: Path, folder: Path) -> None:
    old = set_aside(folder)
    if os.path.lexists(folder):
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        if os.path.lexists(old):
            old.rename(folder)
        raise
    synchronise(folder.parent)  # the new name is on the disk before the old folder is gone
    _remove(old)


def recover(folder: Path) -> None:
    """Give an old folder its name back, if its writer was killed before the new one had it.

    For whoever opens a folder that nobody is writing: a writer at work would be disturbed.
    """
    old = set_aside(folder)
    if os.path.lexists(folder):
        _remove(old)  # killed when the new one was in place
    elif os.path.lexists(old):
        old.rename(folder)
        synchronise(folder.parent)


def unfinished(folder: Path) -> Path:
    """Where `replace_folder` gathers what will be `folder`."""
    return folder.parent / f".{folder.name}.unfinished"


def set_aside(folder: Path) -> Path:
    """Where the folder that is being replaced waits."""
    return folder.parent / f".{folder.name}.replaced"


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
