"""A tokenizer that is trained once for a run or a study, and kept beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atlas_memory.data import train_tokenizer
from atlas_memory.data.folders import recover, replace_folder
from atlas_memory.train.recipe_files import differences

MADE_FROM = "made_from.json"


def keep_tokenizer(
    folder: Path, texts: Iterable[str], vocabulary: int, made_from: Mapping[str, Any], *, progress: bool = True
) -> None:
    """Train it into a folder, with a note of what it is made from; or see that the one there was made from the same."""
    recover(folder)
    if folder.exists():
        _check_same(folder, made_from)
        return
    with replace_folder(folder) as unfinished:
        train_tokenizer(texts, vocabulary, unfinished, progress=progress)
        (unfinished / MADE_FROM).write_text(json.dumps(made_from, indent=1), encoding="utf-8")


def _check_same(folder: Path, made_from: Mapping[str, Any]) -> None:
    """Another one would be used in silence, and words would have other numbers."""
    hint = "remove it, or choose another folder"
    if not (folder / MADE_FROM).is_file():
        raise ValueError(f"{folder} has no {MADE_FROM}: it is not known what it was made from; {hint}.")
    before = json.loads((folder / MADE_FROM).read_text(encoding="utf-8"))
    for field, old, new in differences(before, made_from)[:1]:
        raise ValueError(f"{folder} was made with {field}={old!r}, and not {new!r}; {hint}.")
