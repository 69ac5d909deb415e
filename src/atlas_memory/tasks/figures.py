"""Results as figures: accuracy against length, and for needles a heat map of depth and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas_memory.tasks.lengths import length_name
from atlas_memory.tasks.results import Mean, Report, Result, means
from atlas_memory.train.plot import figure_class, save_figure


def draw(report: Report, out: Path) -> None:
    """Write a PNG file."""
    figure = figure_class()(layout="constrained")
    if any("depth" in result.details for result in report.results):
        _heat_maps(figure, report.results)
    elif len({result.length for result in report.results}) > 1:
        _curves(figure, report.results)
    else:
        _bars(figure, report.results)
    figure.suptitle(f"{report.name}: {Path(report.model).name}")
    save_figure(figure, out)


def compare(reports: Mapping[str, Report], out: Path) -> None:
    """Accuracy against length, a line for each report: the mean of its results with its interval.

    Of lengths at which a report lacks tasks that it has elsewhere, none is shown: means of other tasks are no line.
    """
    figure = figure_class()(layout="constrained")
    lengths = sorted({result.length for report in reports.values() for result in report.results})
    axes = _length_axes(figure, lengths)
    for name, report in reports.items():
        tasks = {result.task for result in report.results}
        whole = [n for n in lengths if tasks == {result.task for result in report.results if result.length == n}]
        mine = means(report.results)
        _line(axes, [lengths.index(length) for length in whole], [mine[length] for length in whole], name)
    axes.legend()
    save_figure(figure, out)


def _length_axes(figure: Any, lengths: Sequence[int]) -> Any:
    """Lengths in equal steps, as 0K has no logarithm."""
    axes = figure.add_subplot(xlabel="length (tokens)", ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
    axes.grid(alpha=0.3)
    return axes


def _line(axes: Any, places: Sequence[int], points: Sequence[Result] | Sequence[Mean], name: str) -> None:
    """With its interval."""
    (line,) = axes.plot(places, [point.accuracy for point in points], marker="o", label=name)
    lows, highs = [point.low for point in points], [point.high for point in points]
    axes.fill_between(places, lows, highs, alpha=0.15, color=line.get_color())


def _curves(figure: Any, results: Sequence[Result]) -> None:
    """One line a task, with its interval."""
    lengths = sorted({result.length for result in results})
    axes = _length_axes(figure, lengths)
    for name, mine in _lines(results).items():
        _line(axes, [lengths.index(result.length) for result in mine], mine, name)
    axes.legend()


def _lines(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by what else than the length tells them apart."""
    lines: dict[str, list[Result]] = {}
    repeated = len({(result.task, result.length) for result in results}) < len(results)
    for result in sorted(results, key=lambda result: result.length):
        details = ", ".join(f"{value} {name}" for name, value in result.details.items()) if repeated else ""
        lines.setdefault(f"{result.task} {details}".strip(), []).append(result)
    return lines


def _bars(figure: Any, results: Sequence[Result]) -> None:
    axes = figure.add_subplot(ylabel="accuracy", ylim=(0, 1.03))
    bars = {name: mine[0] for name, mine in _lines(results).items()}  # of one length
    reach = [[r.accuracy - r.low for r in bars.values()], [r.high - r.accuracy for r in bars.values()]]
    axes.bar(range(len(bars)), [result.accuracy for result in bars.values()], yerr=reach, capsize=4)
    axes.set_xticks(range(len(bars)), list(bars), rotation=20)


def _heat_maps(figure: Any, results: Sequence[Result]) -> None:
    """One map a task: depth down, length to the right."""
    tasks = list(dict.fromkeys(result.task for result in results))
    lengths = sorted({result.length for result in results})
    depths = sorted({result.details["depth"] for result in results})
    figure.set_size_inches(4.5 * len(tasks) + 1, 4)
    image = None
    for place, task in enumerate(tasks, 1):
        found = {(r.details["depth"], r.length): r.accuracy for r in results if r.task == task}
        grid = [[found.get((depth, length), float("nan")) for length in lengths] for depth in depths]
        axes = figure.add_subplot(
            1, len(tasks), place, title=task, xlabel="length (tokens)", ylabel="depth of the needle"
        )
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    figure.colorbar(image, ax=figure.axes, label="accuracy")
