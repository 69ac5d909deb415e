"""Files that are there in full or not at all, and whether they are the same. Folders: see data/folders.py."""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


def check_output(path: Path) -> None:
    """Fail before the work, not after it, where the result could not be written."""
    if path.is_dir():
        raise ValueError(f"out={str(path)!r} is a folder. It should be the file to write.")
    if not path.parent.is_dir():
        raise ValueError(f"out={str(path)!r}: the folder {str(path.parent)!r} does not exist.")
    _check_writable(path, path.parent)


def check_output_folder(path: Path) -> None:
    """The same for a folder, which may be there or be made."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise ValueError(f"out={str(path)!r}: {str(nearest)!r} is a file. It should be a folder, new or old.")
    _check_writable(path, nearest)


def _check_writable(path: Path, folder: Path) -> None:
    probe = folder / f".{uuid.uuid4().hex}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out={str(path)!r} cannot be written: {error}.") from error


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of a safetensors file.

    Copied to where torch puts tensors of its own. In the file they begin at any byte, and a product may be summed in
    another order there: what was saved would go on with other last bits than what was not.
    """
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def write_json(path: Path, content: Any) -> None:
    """Numbers that are not finite must have been taken out: JSON has none."""
    check_output(path)
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def finite(content: Any) -> Any:
    """For JSON: dicts and lists with None for every number that is not finite."""
    if isinstance(content, dict):
        return {key: finite(inner) for key, inner in content.items()}
    if isinstance(content, list):
        return [finite(inner) for inner in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def digest_of(files: Iterable[Path]) -> str:
    """Of the names and contents of files, in this order: the same wherever they lie."""
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            found.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
    return found.hexdigest()


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file that is the old one or the new one at every moment, and never a part."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # with the permissions of any new file
    try:
        with temporary.open("xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
