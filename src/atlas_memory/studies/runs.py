"""The runs of a study: each an ordinary run of `train`, in a folder of its own, continued and never repeated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from atlas_memory.data.folders import recover
from atlas_memory.train import DivergedError, Recipe, train
from atlas_memory.train.loop import FINAL, RECIPE
from atlas_memory.train.recipe_files import differences
from atlas_memory.train.records import LOG, read_log

_log = logging.getLogger(__name__)


def run_folder(out: Path, model: str, seed: int) -> Path:
    return out / "runs" / run_name(model, seed)


def run_name(model: str, seed: int) -> str:
    return f"{model}-seed{seed}"


def finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a run has taken all its steps and saved its model."""
    recover(folder / FINAL)
    if not (folder / FINAL).is_dir() or not (folder / LOG).is_file():
        return False
    return max((line["step"] for line in read_log(folder)), default=0) >= recipe.loop.steps


def trained(folder: Path, recipe: Recipe, progress: bool) -> bool:
    """False: it diverged, which is a result too."""
    _log.info("Training %s.", folder.name)
    try:
        train(recipe, folder, resume=True, progress=progress)
    except DivergedError as error:
        _log.warning("%s: %s", folder.name, error)
        return False
    return True


def _read_recipe(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"out: {file} is damaged ({error}); remove its folder to repeat the run.") from error
    if not isinstance(content, dict):
        raise ValueError(f"out: {file} is damaged; remove its folder to repeat the run.")
    return content


def check_same(folder: Path, recipe: Recipe) -> None:
    """A run of other settings must be neither counted nor continued."""
    if not (folder / RECIPE).is_file():
        return
    changed = differences(_read_recipe(folder / RECIPE), recipe.to_dict())
    if changed:
        field, old, new = changed[0]
        raise ValueError(
            f"out={str(folder.parents[1])!r} holds {folder.name} with {field}={old!r}, and not {new!r}; "
            "give the same settings, or another folder."
        )
