"""Results of runs with several seeds, as rows, as a markdown table and as a figure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from atlas_memory.train.plot import figure_class, save_figure


@dataclasses.dataclass(frozen=True)
class Result:
    """One run. tokens: where it was validated."""

    model: str
    seed: int
    parameters: int
    diverged: bool
    tokens: list[int]
    validation_losses: list[float]
    speeds: list[float]  # tokens/s of logged steps


@dataclasses.dataclass(frozen=True)
class Row:
    """One model, over its seeds. The loss is the last one, of runs that did not diverge; None: there are none."""

    model: str
    parameters: int
    seeds: int
    diverged: int
    loss: float | None
    deviation: float | None  # of the sample; None with fewer than two
    tokens: int
    tokens_per_second: float | None  # median of all logged steps of all runs


def summarise(results: Sequence[Result]) -> list[Row]:
    """One row for each model, in the order of the runs."""
    return [
        _row([result for result in results if result.model == model])
        for model in dict.fromkeys(result.model for result in results)
    ]


def _row(runs: Sequence[Result]) -> Row:
    losses = [run.validation_losses[-1] for run in runs if not run.diverged and run.validation_losses]
    speeds = [speed for run in runs for speed in run.speeds]
    return Row(
        model=runs[0].model,
        parameters=runs[0].parameters,
        seeds=len(runs),
        diverged=sum(run.diverged for run in runs),
        loss=statistics.mean(losses) if losses else None,
        deviation=statistics.stdev(losses) if len(losses) > 1 else None,
        tokens=max((run.tokens[-1] for run in runs if run.tokens), default=0),
        tokens_per_second=statistics.median(speeds) if speeds else None,
    )


def markdown(rows: Sequence[Row]) -> str:
    """Best first."""
    lines = ["| model | parameters | tokens | seeds | validation loss | tokens/s |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: float("inf") if row.loss is None else row.loss):
        speed = "–" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        lines.append(f"| `{row.model}` | {row.parameters:,} | {row.tokens:,} | {row.seeds} | {_loss(row)} | {speed} |")
    return "\n".join(lines) + "\n"


def _loss(row: Row) -> str:
    deviation = "" if row.deviation is None else f" ± {row.deviation:.4f}"
    mean = "–" if row.loss is None else f"{row.loss:.4f}{deviation}"
    return mean + (f" ({row.diverged} diverged)" if row.diverged else "")


def figure(results: Sequence[Result], path: Path) -> None:
    """Validation loss by tokens, the mean over seeds; and where each model ends, with its deviation."""
    drawing = figure_class()(figsize=(12, 4.5), layout="constrained")
    curves = drawing.add_subplot(1, 2, 1, xlabel="tokens", ylabel="validation loss")
    ends = drawing.add_subplot(1, 2, 2, xlabel="validation loss, mean ± deviation over seeds")
    rows = summarise(results)
    for place, row in enumerate(rows):
        runs = [run for run in results if run.model == row.model and not run.diverged and run.tokens]
        if not runs or row.loss is None:
            continue
        means = [statistics.mean(losses) for losses in zip(*(run.validation_losses for run in runs), strict=True)]
        (line,) = curves.plot(runs[0].tokens, means, label=row.model)
        ends.errorbar(row.loss, place, xerr=row.deviation or 0.0, fmt="o", color=line.get_color(), capsize=3)
    if curves.lines:
        curves.legend(fontsize="small")
    curves.grid(alpha=0.3)
    ends.set_yticks(range(len(rows)), [row.model for row in rows])
    ends.invert_yaxis()
    ends.grid(alpha=0.3)
    save_figure(drawing, path)
