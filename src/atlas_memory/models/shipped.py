"""The trained models that come with the package."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "shipped"
# Name on the command line → folder.
SHIPPED = {"shipped": "memory", "window": "window"}


def model_folder(name_or_path: str | Path) -> Path:
    """The folder of a shipped model by its name, or the path as it is."""
    name = SHIPPED.get(str(name_or_path))
    return Path(name_or_path) if name is None else FOLDER / name


def results_folder() -> Path:
    """Reports of `atlas-memory eval` on the shipped models, and on those they are compared with."""
    return FOLDER / "results"
