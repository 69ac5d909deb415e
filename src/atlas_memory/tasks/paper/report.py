"""What an evaluation found: scores and their averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from atlas_memory.files import finite
from atlas_memory.tasks.paper.groups import GROUPS, PaperTask, paper_tasks


@dataclass(frozen=True)
class Score:
    """One number of the table."""

    task: str
    group: str
    metric: str
    value: float
    standard_error: float | None  # None where the harness has no estimate
    higher_is_better: bool
    rows: int
    version: str  # of the harness's task: numbers of different versions do not compare


@dataclass(frozen=True)
class Report:
    """The scores, and what they were taken of."""

    model: str
    group: str
    data: str | None
    limit: int | None
    scores: list[Score]
    left_out: list[str]  # tasks of the group without a local file
    versions: dict[str, str]

    def averages(self) -> dict[str, float]:
        """Mean accuracy of each group, perplexities apart; only of a group none of whose tasks was left out."""
        means = {}
        for group in GROUPS:
            accuracies = [score.value for score in self.scores if score.group == group and score.higher_is_better]
            if accuracies and not any(task.name in self.left_out for task in paper_tasks(group)):
                means[group] = fmean(accuracies)
        return means

    def to_dict(self) -> dict[str, Any]:
        """For JSON: a number that is not finite becomes null."""
        content: dict[str, Any] = finite({**asdict(self), "averages": self.averages()})
        return content


def scores_of(results: dict[str, Any], tasks: Sequence[PaperTask]) -> list[Score]:
    """The metrics that are shown, from the harness's results."""
    return [_score(results, task, metric) for task in tasks for metric in task.metrics]


def _score(results: dict[str, Any], task: PaperTask, metric: str) -> Score:
    values = results["results"][task.name]
    error = values.get(f"{metric}_stderr,none")
    return Score(
        task=task.name,
        group=task.group,
        metric=metric,
        value=float(values[f"{metric},none"]),
        standard_error=float(error) if isinstance(error, int | float) else None,  # the harness writes "N/A"
        higher_is_better=bool(results["higher_is_better"][task.name][metric]),
        rows=results["n-samples"][task.name]["effective"],
        version=str(results["versions"].get(task.name)),
    )
