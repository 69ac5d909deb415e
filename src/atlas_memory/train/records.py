"""What happened in a run: a line of JSON a logged step, a progress bar, and whatever trackers are installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from accelerate.utils import is_tensorboard_available, is_trackio_available, is_wandb_available
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from atlas_memory.files import finite, write_whole
from atlas_memory.train.recipe import Recipe

LOG = "log.jsonl"
_AVAILABLE = {"trackio": is_trackio_available, "wandb": is_wandb_available}


def trackers(recipe: Recipe) -> list[str]:
    """Names of Accelerate's trackers to use. One that was asked for and is not installed is an error."""
    for name in recipe.logging.trackers:
        if not _AVAILABLE[name]():
            raise ValueError(f"logging.trackers has {name!r}, which is not installed: pip install {name}.")
    board = ["tensorboard"] if recipe.logging.tensorboard and is_tensorboard_available() else []
    return [*board, *recipe.logging.trackers]


def read_log(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, null being a number that is not finite; a last line cut off by a crash is left out."""
    path = run / LOG
    if not path.is_file():
        raise ValueError(f"run={str(run)!r} has no {LOG}; accepted: a folder given to `train --out`.")
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append({name: math.nan if value is None else value for name, value in json.loads(line).items()})
        except json.JSONDecodeError:
            break
    return lines


def forget_after(run: Path, step: int, validated: bool) -> None:
    """Drop the lines that a run resumed after a step will write again. validated: it knows the loss of that step."""

    def written_again(line: dict[str, Any]) -> bool:
        later = line["step"] > step or "data_ended" in line
        return later or ("validation_loss" in line and line["step"] == step and not validated)

    if (run / LOG).is_file():
        kept = [line for line in read_log(run) if not written_again(line)]
        write_whole(run / LOG, "".join(map(_as_text, kept)))


def _as_text(line: dict[str, Any]) -> str:
    return json.dumps(finite(line), allow_nan=False) + "\n"


class Records:
    """Writes on the main process, and does nothing on the others."""

    def __init__(self, run: Path, recipe: Recipe, accelerator: Accelerator, begin: int, progress: bool) -> None:
        self._accelerator, self._main = accelerator, accelerator.is_main_process
        self._file = (run / LOG).open("a", encoding="utf-8") if self._main else None
        if self._main and accelerator.log_with:
            flat = {f"{s}.{k}": str(v) for s, fields in recipe.to_dict().items() for k, v in _items(fields)}
            accelerator.init_trackers(run.name, config=flat)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not (progress and self._main),
        )
        self._task = self._bar.add_task("", total=recipe.loop.steps, completed=begin)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if self._file is not None:
            self._file.close()
            for tracker in self._accelerator.trackers:
                tracker.finish()
            self._accelerator.trackers = []

    def advance(self) -> None:
        self._bar.advance(self._task)

    def write(self, line: dict[str, Any]) -> None:
        """One line: `step`, and numbers by name."""
        if self._file is None:
            return
        self._file.write(_as_text(line))
        self._file.flush()
        if self._accelerator.log_with:
            self._accelerator.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])
        if "loss" in line:
            self._bar.update(self._task, description=_described(line))


def _described(line: dict[str, Any]) -> str:
    """What fits beside the bar; the rest is in the log."""
    return f"loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s"


def _items(fields: Any) -> Any:
    return fields.items() if isinstance(fields, dict) else [("value", fields)]
