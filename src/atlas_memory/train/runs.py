"""Runs on disk: found, summed up, compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from atlas_memory.train.recipe_files import leaves
from atlas_memory.train.records import LOG, read_log

COLUMNS = ("run", "model", "step", "Mtokens", "loss", "valid.", "best", "tok/s", "bad", "done")


@dataclasses.dataclass(frozen=True)
class Run:
    """A folder that `train` wrote."""

    folder: Path
    recipe: dict[str, Any]
    log: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.folder.name

    def values(self, quantity: str) -> tuple[list[int], list[float]]:
        """Steps, and what was logged under a name in them."""
        lines = [line for line in self.log if quantity in line]
        return [line["step"] for line in lines], [line[quantity] for line in lines]

    def _model(self) -> str:
        if self.recipe.get("start"):
            return "from " + " + ".join(self.recipe["start"])
        return f"{self.recipe['model'].get('preset', 'atlas')} {self.recipe['model'].get('backbone', 'mag')}"

    def row(self) -> tuple[str, ...]:
        """As in COLUMNS."""
        step, steps = max((line["step"] for line in self.log), default=0), self.recipe["loop"]["steps"]
        validation = self.values("validation_loss")[1]
        ended = step >= steps or any("data_ended" in line for line in self.log)
        state = "yes" if (self.folder / "final").is_dir() and ended else f"{step / steps:.0%}"
        return (
            self.name,
            self._model(),
            f"{step:,}",
            _number([n / 1e6 for n in self.values("tokens")[1][-1:]], ",.2f"),
            _number(self.values("loss")[1][-1:], ".3f"),
            _number(validation[-1:], ".3f"),
            _number(sorted(filter(math.isfinite, validation))[:1], ".3f"),
            _number(
                sorted(speeds)[len(speeds) // 2 :][:1] if (speeds := self.values("tokens_per_second")[1]) else [],
                ",.0f",
            ),
            _number(self.values("skipped")[1][-1:], ".0f"),
            state,
        )


def find(folders: Sequence[Path]) -> list[Run]:
    """Runs among the folders, or directly below them; none at all is an error."""
    found = [_open(folder) for given in folders for folder in _candidates(given)]
    if not found:
        listed = ", ".join(repr(str(folder)) for folder in folders)
        raise ValueError(f"folders={listed} hold no run; accepted: folders given to `train --out`, or above these.")
    return found


def differing_fields(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Fields of the recipes that are not the same in all runs, and their values."""
    flat = [dict(leaves(run.recipe)) for run in runs]
    fields = dict.fromkeys(field for recipe in flat for field in recipe)
    values = {field: [recipe.get(field) for recipe in flat] for field in fields}
    return [(field, found) for field, found in values.items() if any(value != found[0] for value in found)]


def _candidates(folder: Path) -> Iterator[Path]:
    if (folder / LOG).is_file():
        yield folder
    elif folder.is_dir():
        yield from sorted(path.parent for path in folder.glob(f"*/{LOG}"))


def _open(folder: Path) -> Run:
    return Run(folder, yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8")), read_log(folder))


def _number(values: Sequence[float], form: str) -> str:
    return format(values[0], form) if values else ""
