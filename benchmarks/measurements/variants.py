"""One variant of the standard layer against another, forward + backward."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.registry import Measured, Run, Target, at_most, measurement
from benchmarks.subjects import layer
from benchmarks.timing import interleave, ratio


def against_base(run: Run, changes: dict[str, Any]) -> Measured:
    """Time of `titans` with changes, over that of `titans`."""
    works = {"changed": layer("titans", **changes), "base": layer("titans")}
    seconds = interleave({name: partial(work.run, True) for name, work in works.items()}, run.repetitions(11))
    return Measured(ratio(seconds, "changed", "base"), {"changes": changes, "seconds": seconds})


ROWS: tuple[tuple[str, str, dict[str, Any], Target], ...] = (
    ("window", "a window of 16 against 1", {"window": 16}, at_most(1.3)),
    ("muon.interval_64", "Muon every 64 tokens against momentum", {"optimizer": "muon", "interval": 64}, at_most(2.0)),
    (
        "muon.interval_256",
        "Muon every 256 tokens against momentum",
        {"optimizer": "muon", "interval": 256},
        at_most(1.3),
    ),
)
for name, words, changes, target in ROWS:
    measurement(name, f"`titans`, {words}: time, forward + backward", "×", target)(
        partial(against_base, changes=changes)
    )
