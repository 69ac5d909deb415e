"""What an evaluation found: accuracies with their intervals, as JSON, as a table."""

from __future__ import annotations

import dataclasses
import importlib
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from atlas_memory.checks import check_whole
from atlas_memory.tasks.lengths import length_name

CONFIDENCE = 0.95
PACE = ("batch", "step")  # settings of an evaluation that its answers do not depend on
DIGEST = "_digest"  # a setting that names files has one beside it, of what is in them


def by_content(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the names of files whose contents are told: equal for the same files, wherever they lie."""
    return {name: value for name, value in settings.items() if name + DIGEST not in settings}


def wilson(right: float, samples: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval for a share: (low, high).

    >>> [round(bound, 3) for bound in wilson(10, 10)]
    [0.722, 1.0]
    """
    if not 0 <= right <= samples or not samples:
        raise ValueError(f"right={right}, samples={samples}: at least one sample, and no more right than there are.")
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = right / samples, z**2 / samples
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    # At the ends the interval ends there; rounding must not move it.
    return (0.0 if right == 0 else middle - half), (1.0 if right == samples else middle + half)


@dataclasses.dataclass(frozen=True)
class Result:
    """One cell.

    length: what was asked for. gpt2_tokens, tokens: means over samples, the model's own tokens second.
    tokens_per_second: of the model's own, over all rows of a batch. peak_rss_mb: the most memory the process had had
    by then. first: the number of the first sample, which the others follow.
    """

    task: str
    length: int
    samples: int
    accuracy: float
    low: float
    high: float
    tokens_per_second: float
    peak_rss_mb: float
    gpt2_tokens: float
    tokens: float
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    first: int = 0

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Result:
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in content.items() if name in names}
        for name, value in known.items():
            if name == "task" and not isinstance(value, str):
                raise ValueError(f"task={value!r} must be a name.")
            if name not in ("task", "details") and not _is_number(value):
                raise ValueError(f"{name}={value!r} must be a finite number.")
        for name in ("samples", "tokens", "tokens_per_second"):
            if not known[name] > 0:
                raise ValueError(f"{name}={known[name]!r} must be above 0.")
        check_whole("samples", known["samples"])
        return cls(**known, details={name: value for name, value in content.items() if name not in names})

    def to_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        details = fields.pop("details")
        return fields | details


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclasses.dataclass(frozen=True)
class Report:
    name: str  # babilong, niah, mqar, mad
    model: str
    settings: dict[str, Any]
    results: list[Result]

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Report:
        """What `to_dict` made."""
        results = [Result.from_dict(result) for result in content["results"]]
        if not results:
            raise ValueError("results=[]: there are none.")
        return cls(content["evaluation"], content["model"], dict(content["settings"]), results)

    def to_dict(self) -> dict[str, Any]:
        results = [result.to_dict() for result in self.results]
        return {"model": self.model, "evaluation": self.name, "settings": self.settings, "results": results}

    def table(self) -> Table:
        """Narrow, so that it fits a terminal; where it does not, numbers are broken, never the name of a task."""
        extra = list(dict.fromkeys(name for result in self.results for name in result.details))
        numbers = ("samples", "accuracy", "low–high", "own tokens", "own/s")
        memory = max((result.peak_rss_mb for result in self.results), default=0.0)
        table = Table(
            Column("task", no_wrap=True),
            *(Column(name, overflow="fold") for name in ("length", *extra, *numbers)),
            title=escape(f"{self.name}: {self.model}"),
            caption=f"low–high: {CONFIDENCE:.0%} interval; own: tokens of the model; up to {memory:,.0f} MB of memory",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for result in self.results:
            table.add_row(
                result.task,
                length_name(result.length),
                *(str(result.details.get(name, "")) for name in extra),
                f"{result.samples:,}",
                f"{result.accuracy:.1%}",
                _interval(result.low, result.high),
                *(f"{number:,.0f}" for number in (result.tokens, result.tokens_per_second)),
            )
        table.add_section()
        for name, detail, length, found in self._means():
            cells = (f"{found.accuracy:.1%}", _interval(found.low, found.high))
            table.add_row(name, length_name(length), *(detail for _ in extra), "", *cells)
        return table

    def _means(self) -> Iterator[tuple[str, str, int, Mean]]:
        """At each length: of tasks that were measured in one way, and of a task that was in several."""
        tasks, lengths = (
            list(dict.fromkeys(getattr(result, name) for result in self.results)) for name in ("task", "length")
        )
        if len(tasks) > 1 and len(self.results) == len(tasks) * len(lengths):
            yield from (("mean", "", length, found) for length, found in means(self.results).items())
        for task in tasks:
            mine = [result for result in self.results if result.task == task]
            if len(mine) > len({result.length for result in mine}):
                yield from ((task, "all", length, found) for length, found in means(mine).items())


def _interval(low: float, high: float) -> str:
    return f"{100 * low:.1f}–{100 * high:.1f}"


def peak_rss_mb() -> float:
    """The most memory this process has had so far, in megabytes."""
    try:
        import resource
    except ImportError:  # Windows has none; psutil comes with accelerate
        memory = importlib.import_module("psutil").Process().memory_info()
        return float(memory.peak_wset) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, kilobytes elsewhere


class Mean(NamedTuple):
    accuracy: float
    low: float
    high: float


def means(results: Sequence[Result]) -> dict[int, Mean]:
    """Mean accuracy over tasks at each length, all tasks weighing the same, and its interval."""
    lengths = dict.fromkeys(result.length for result in results)
    return {length: mean([result for result in results if result.length == length]) for length in lengths}


def mean(results: Sequence[Result]) -> Mean:
    """Wilson's interval, for as many answers as would make a mean as uncertain if they were of one task."""
    accuracy = statistics.fmean(result.accuracy for result in results)
    answers = len(results) ** 2 / sum(1 / result.samples for result in results)
    return Mean(accuracy, *wilson(accuracy * answers, answers))
