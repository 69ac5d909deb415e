"""Reports of one model put together: other tasks and lengths, or further samples of the same.

An evaluation over ten million tokens is shared among machines, or made in several sittings, each with samples of its
own (`--first`); which samples a result is of stands in it, so that none counts twice and none is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from atlas_memory.tasks.lengths import length_name
from atlas_memory.tasks.results import Report, Result, wilson

# What reports of one evaluation may differ in.
_VARYING = ("tasks", "lengths", "samples", "first", "precision", "depths")


def merge(reports: Sequence[Report]) -> Report:
    """One report of all results, by task and length; settings that are not the same in all are left out."""
    if not reports:
        raise ValueError("reports=[]: there is nothing to merge.")
    same = reports[0]
    for other in reports[1:]:
        _check_same(same, other)
    cells: dict[tuple[object, ...], list[Result]] = {}
    for result in sorted((result for report in reports for result in report.results), key=_place):
        cells.setdefault((result.task, result.length, *sorted(result.details.items())), []).append(result)
    settings = {
        name: value
        for name, value in same.settings.items()
        if all(other.settings.get(name) == value for other in reports)
    }
    return Report(same.name, same.model, settings, [_merged(results) for results in cells.values()])


def _place(result: Result) -> tuple[str, int, int]:
    return result.task, result.length, result.first


def _check_same(one: Report, other: Report) -> None:
    if (one.name, one.model) != (other.name, other.model):
        raise ValueError(
            f"reports: {one.name} of model={one.model!r} and {other.name} of model={other.model!r} "
            "are not parts of one; accepted: one evaluation of one model."
        )
    for name in sorted((one.settings.keys() | other.settings.keys()) - set(_VARYING)):
        values = one.settings.get(name), other.settings.get(name)
        if values[0] != values[1]:
            raise ValueError(f"reports: {name}={values[0]!r} in one and {values[1]!r} in another; must be the same.")


def _merged(results: Sequence[Result]) -> Result:
    """Of one cell, in the order of their samples."""
    for before, after in itertools.pairwise(results):
        end = before.first + before.samples
        if after.first != end:
            what = f"samples {after.first} to {end - 1} twice" if after.first < end else f"no sample {end}"
            raise ValueError(
                f"reports have {what} of {after.task} at {length_name(after.length)}; accepted: each sample once, "
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
