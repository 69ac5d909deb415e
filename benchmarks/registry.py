"""The table of measurements: a name, what is compared, the target, and the function that measures it."""

from __future__ import annotations

import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.timing import noise


@dataclasses.dataclass(frozen=True)
class Run:
    """How thoroughly to measure."""

    quick: bool = False

    def repetitions(self, thorough: int) -> int:
        return min(2, thorough) if self.quick else thorough


@dataclasses.dataclass(frozen=True)
class Target:
    relation: str  # ≥ or ≤
    limit: float

    def reached(self, value: float) -> bool:
        return value >= self.limit if self.relation == "≥" else value <= self.limit


def at_least(limit: float) -> Target:
    return Target("≥", limit)


def at_most(limit: float) -> Target:
    return Target("≤", limit)


@dataclasses.dataclass(frozen=True)
class Measured:
    value: float
    raw: dict[str, Any]  # every number the value was made from
    note: str = ""


class NotAvailableError(Exception):
    """Something that is not part of the library is missing: there is no number, and nothing has failed."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    name: str
    what: str
    unit: str  # a key of report.FORMATS
    target: Target | None
    function: Callable[[Run], Measured]


MEASUREMENTS: dict[str, Measurement] = {}


def measurement(
    name: str, what: str, unit: str, target: Target | None = None
) -> Callable[[Callable[[Run], Measured]], Callable[[Run], Measured]]:
    """Enter a function into the table."""

    def enter(function: Callable[[Run], Measured]) -> Callable[[Run], Measured]:
        if name in MEASUREMENTS:
            raise ValueError(f"name={name!r} is taken.")
        MEASUREMENTS[name] = Measurement(name, what, unit, target, function)
        return function

    return enter


def chosen(names: Sequence[str]) -> list[Measurement]:
    """Those with these names, or below them ("muon" is all of "muon.…"); all of them if none is named."""
    if not names:
        return list(MEASUREMENTS.values())
    for name in names:
        if not any(_is_below(known, name) for known in MEASUREMENTS):
            raise ValueError(f"name={name!r} is unknown. Known: {', '.join(MEASUREMENTS)}.")
    return [entry for known, entry in MEASUREMENTS.items() if any(_is_below(known, name) for name in names)]


def _is_below(known: str, name: str) -> bool:
    return known == name or known.startswith(f"{name}.")


def measure(entry: Measurement, run: Run) -> dict[str, Any]:
    """The record of one measurement, as it is written to JSON. The only place where errors are caught."""
    target = entry.target and dataclasses.asdict(entry.target)
    record: dict[str, Any] = {"name": entry.name, "what": entry.what, "unit": entry.unit, "target": target}
    start = time.perf_counter()
    try:
        measured = entry.function(run)
        reached = entry.target and entry.target.reached(measured.value)
        spread = noise(measured.raw["seconds"]) if "seconds" in measured.raw else None
        record |= {"status": "measured", **dataclasses.asdict(measured), "reached": reached, "noise": spread}
    except NotAvailableError as reason:
        record |= {"status": "unavailable", "value": None, "reached": None, "note": str(reason)}
    except Exception:
        record |= {"status": "failed", "value": None, "reached": None, "note": traceback.format_exc()}
    return record | {"took_seconds": time.perf_counter() - start, "load": os.getloadavg()[0]}
