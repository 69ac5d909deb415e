"""Reports of one model put together: other tasks and lengths, or further samples of the same.

An evaluation over ten million tokens is shared among machines, or made in several sittings, each with samples of its
own (`--first`); which samples a result is of stands in it, so that none counts twice and none is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from atlas_memory.tasks.lengths import length_name
from atlas_memory.tasks.results import DIGEST, PACE, Report, Result, wilson

# Which results there are: that stands in the results.
_CHOSEN = ("tasks", "lengths", "samples", "first", "depths")
# What reports of one evaluation may differ in besides.
_VARYING = (*PACE, "precision")


def merge(reports: Sequence[Report]) -> Report:
    """One report of all results, by task and length; settings that are not the same in all are left out.

    Settings that name files are the same if what is in the files is. Where cells differ in precision, the setting has
    that of each.
    """
    if not reports:
        raise ValueError("reports=[]: there is nothing to merge.")
    for pair in itertools.combinations(reports, 2):
        _check_same(*pair)
    parts = [(result, _precision(report, result)) for report in reports for result in report.results]
    cells: dict[str, list[Result]] = {}
    precisions: dict[str, str | None] = {}
    for result, precision in sorted(parts, key=lambda part: (part[0].task, part[0].length, part[0].first)):
        cell = _cell_name(result)
        cells.setdefault(cell, []).append(result)
        if precisions.setdefault(cell, precision) != precision:
            values = f"{precisions[cell]!r} in one and {precision!r} in another"
            raise ValueError(f"reports: {cell} has precision={values}; must be the same for all samples of a cell.")
    settings = _common_settings(reports) | _described(precisions)
    return Report(reports[0].name, reports[0].model, settings, [_merged(results) for results in cells.values()])


def _cell_name(result: Result) -> str:
    """What tells a cell from others: `qa1 at 4K`, `single_1 at 4K, depth=0.5`."""
    details = (f"{name}={value}" for name, value in sorted(result.details.items()))
    return ", ".join((f"{result.task} at {length_name(result.length)}", *details))


def _precision(report: Report, result: Result) -> str | None:
    """None: it is not known."""
    precision: Any = report.settings.get("precision")
    found: str | None = precision.get(_cell_name(result)) if isinstance(precision, dict) else precision
    return found


def _described(precisions: dict[str, str | None]) -> dict[str, Any]:
    """As a setting: one for all cells, or that of each."""
    different = set(precisions.values())
    return {} if different <= {None} else {"precision": different.pop() if len(different) == 1 else precisions}


def _common_settings(reports: Sequence[Report]) -> dict[str, Any]:
    """Of files that are the same under several names, the first."""
    first = reports[0].settings
    return {
        name: value
        for name, value in first.items()
        if name not in (*_CHOSEN, "precision")
        and (name + DIGEST in first or all(other.settings.get(name) == value for other in reports))
    }


def _check_same(one: Report, other: Report) -> None:
    """By digests where both have them, else by names."""
    mine, theirs = ({"evaluation": report.name, "model": report.model, **report.settings} for report in (one, other))
    for name in sorted((mine.keys() | theirs.keys()) - {*_CHOSEN, *_VARYING}):
        plain = name.removesuffix(DIGEST)
        by_digest = plain + DIGEST in mine and plain + DIGEST in theirs
        if by_digest == (name != plain) and mine.get(name) != theirs.get(name):
            values = f"{plain}={mine.get(plain)!r} in one and {theirs.get(plain)!r} in another"
            different = "differ in what is in their files" if by_digest else "are not the same"
            raise ValueError(f"reports: {values} {different}; accepted: parts of one evaluation of one model.")


def _merged(results: Sequence[Result]) -> Result:
    """Of one cell, in the order of their samples."""
    for before, after in itertools.pairwise(results):
        end = before.first + before.samples
        if after.first != end:
            last = min(end, after.first + after.samples) - 1
            what = f"samples {after.first} to {last} twice" if after.first < end else f"no sample {end}"
            raise ValueError(
                f"reports have {what} of {_cell_name(after)}; accepted: each sample once, "
                "and no gap between the first and the last."
            )
    first, samples = results[0], sum(result.samples for result in results)
    right = sum(result.accuracy * result.samples for result in results)
    tokens = sum(result.tokens * result.samples for result in results)
    seconds = sum(result.tokens * result.samples / result.tokens_per_second for result in results)
    low, high = wilson(right, samples)
    return Result(
        task=first.task,
        length=first.length,
        samples=samples,
        accuracy=right / samples,
        low=low,
        high=high,
        tokens_per_second=tokens / seconds,
        peak_rss_mb=max(result.peak_rss_mb for result in results),
        gpt2_tokens=sum(result.gpt2_tokens * result.samples for result in results) / samples,
        tokens=tokens / samples,
        details=first.details,
        first=first.first,
    )
