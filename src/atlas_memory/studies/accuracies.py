"""Accuracies of runs with several seeds, as a markdown table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from atlas_memory.tasks.lengths import length_name
from atlas_memory.tasks.results import CONFIDENCE, Report, wilson

CAPTION = (
    f"In brackets: Wilson's {100 * CONFIDENCE:.0f} % interval of all n answers together, to the same questions with "
    "every seed; ±: the standard deviation over seeds."
)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Of one model, one for each seed."""

    reports: Sequence[Report]  # of those that were trained
    diverged: int = 0

    def together(self) -> Report:
        """All results as if of one model: their means are those over seeds."""
        first = self.reports[0]
        return dataclasses.replace(first, results=[result for report in self.reports for result in report.results])

    def cell(self, tasks: Sequence[str], length: int) -> str:
        """Accuracy on these tasks at one length: the mean over seeds, its spread, the interval of all answers."""
        if not self.reports:
            return "diverged"
        found = [[r for r in report.results if r.task in tasks and r.length == length] for report in self.reports]
        means = [statistics.fmean(result.accuracy for result in results) for results in found]
        spread = f" ± {100 * statistics.stdev(means):.1f}" if len(means) > 1 else ""
        answers = sum(result.samples for results in found for result in results)
        right = sum(round(result.accuracy * result.samples) for results in found for result in results)
        low, high = wilson(right, answers)
        return f"{100 * statistics.fmean(means):.1f} %{spread} ({100 * low:.1f}–{100 * high:.1f}, n = {answers:,})"


def markdown(models: Mapping[str, Runs], tasks: Sequence[str], lengths: Sequence[int], notes: Sequence[str]) -> str:
    """Of every model the mean over tasks, and each task below; notes: what else to say below."""
    lines = [
        f"| model | seeds | task | {' | '.join(map(length_name, lengths))} |",
        "|---" * (len(lengths) + 3) + "|",
    ]
    groups = {task: (task,) for task in tasks} if len(tasks) == 1 else {"mean": tasks, **{t: (t,) for t in tasks}}
    for name, runs in models.items():
        diverged = f" ({runs.diverged} diverged)" if runs.diverged else ""
        for title, group in groups.items() if runs.reports else [("", tasks)]:
            cells = " | ".join(runs.cell(group, length) for length in lengths)
            lines.append(f"| `{name}` | {len(runs.reports) + runs.diverged}{diverged} | {title} | {cells} |")
    return "\n\n".join(["\n".join(lines), CAPTION, *notes]) + "\n"
