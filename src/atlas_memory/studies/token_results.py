"""What small models of the family reached on MQAR and MAD: a table, and a figure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from atlas_memory.train.plot import figure_class, save_figure

MQAR = "mqar"
GROUP_WIDTH = 0.8  # of the bars of a task, all models together


@dataclasses.dataclass(frozen=True)
class Measured:
    model: str
    task: str
    key_width: int
    seed: int
    accuracy: float  # mean over the settings of the task; 0 where training diverged
    state_bytes: int  # of one row, at the end of its longest text
    parameters: int
    diverged: bool = False


def markdown(found: Sequence[Measured]) -> str:
    """Accuracies, the mean over seeds: one row a model; one column a task, or a width of MQAR. Diverged ones are 0.

    Models that lack a column have no mean: it would be of something else than that of the others.
    """
    tasks = list(dict.fromkeys(entry.task for entry in found))
    widths = sorted({entry.key_width for entry in found})
    columns = [(task, width) for task in tasks for width in widths]
    titles = [f"key width {width}" if task == MQAR else task for task, width in columns]
    lines = [f"| model | {' | '.join(titles)} | mean |", "|---" * (len(columns) + 2) + "|"]
    for model in dict.fromkeys(entry.model for entry in found):
        cells = [_cell([e for e in found if (e.model, e.task, e.key_width) == (model, *column)]) for column in columns]
        known = [value for value, _ in cells if value is not None]
        mean = f"{100 * statistics.mean(known):.1f} %" if len(known) == len(columns) else "–"
        lines.append(f"| `{model}` | {' | '.join(text for _, text in cells)} | {mean} |")
    return "\n".join(lines) + "\n"


def _cell(runs: Sequence[Measured]) -> tuple[float | None, str]:
    if not runs:
        return None, "–"
    mean, diverged = statistics.mean(run.accuracy for run in runs), sum(run.diverged for run in runs)
    size = f" ({runs[0].state_bytes / 1000:,.1f} kB)" if runs[0].task == MQAR else ""
    if diverged == len(runs):
        return mean, f"diverged{size}"
    return mean, f"{100 * mean:.1f} %{size}" + (f" ({diverged} diverged)" if diverged else "")


def figure(found: Sequence[Measured], path: Path) -> None:
    """One task: accuracy by the bytes of the state, a line for each model. Several: bars of each model's accuracies.

    Both are means over seeds.
    """
    tasks, models = (list(dict.fromkeys(getattr(entry, name) for entry in found)) for name in ("task", "model"))
    width = GROUP_WIDTH / len(models)
    drawing = figure_class()(figsize=(9, 4.5), layout="constrained")
    axes = drawing.add_subplot(ylabel="accuracy", ylim=(0, 1.02))
    for place, model in enumerate(models):
        runs = [entry for entry in found if entry.model == model]
        if len(tasks) == 1:
            axes.plot(*zip(*_points(runs), strict=True), "o-", label=model)
        else:
            of_task = ([run.accuracy for run in runs if run.task == task] for task in tasks)
            means = [statistics.mean(accuracies or [math.nan]) for accuracies in of_task]  # no bar where there is none
            shift = width * (place - (len(models) - 1) / 2)  # the bars of a task stand around its name
            axes.bar([number + shift for number in range(len(tasks))], means, width, label=model)
    if len(tasks) == 1:
        axes.set(xscale="log", xlabel="bytes of the state")
    else:
        axes.set_xticks(range(len(tasks)), tasks, fontsize="small")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    save_figure(drawing, path)


def _points(runs: Sequence[Measured]) -> list[tuple[int, float]]:
    """Of one model: the bytes of its state and its mean accuracy, for each width."""
    widths = {run.key_width: [other for other in runs if other.key_width == run.key_width] for run in runs}
    return sorted((same[0].state_bytes, statistics.mean(run.accuracy for run in same)) for same in widths.values())
