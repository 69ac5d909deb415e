"""Candidates take turns, A B A B …, so that whatever else the machine does meets all of them alike. Medians count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.work import Work

# Idle OpenMP threads of the candidate before spin for some milliseconds: let them fall asleep. Then the next candidate
# runs once to wake its own, and is timed the second time: in use, calls follow one another.
PAUSE = 0.02

MATMUL_SIZE = 2048

Seconds = dict[str, list[float]]


def interleave(
    candidates: Mapping[str, Callable[[], float]], repetitions: int, warmups: int = 1, pause: float = PAUSE
) -> Seconds:
    """Seconds of every repetition of every candidate, after some that are not counted."""
    seconds: Seconds = {name: [] for name in candidates}
    for repetition in range(-warmups, repetitions):
        for name, run in candidates.items():
            time.sleep(pause)
            run()
            taken = run()
            if repetition >= 0:
                seconds[name].append(taken)
    return seconds


def ratio(seconds: Seconds, numerator: str, denominator: str) -> float:
    """Of the medians."""
    return statistics.median(seconds[numerator]) / statistics.median(seconds[denominator])


def noise(seconds: Seconds) -> float:
    """The widest spread among candidates: half of the distance between quartiles, over the median."""

    def spread(taken: list[float]) -> float:
        low, middle, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else taken * 3
        return (high - low) / 2 / middle

    return max(spread(taken) for taken in seconds.values())


def matmul() -> Callable[[], float]:
    """A large float32 matrix product: the machine's own speed, as a candidate."""
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE)
    work = Work(lambda: a @ b, [])
    return lambda: work.run(backward=False)


def matmul_flops_per_second(seconds: list[float]) -> dict[str, float]:
    flops = 2 * MATMUL_SIZE**3
    return {"median": flops / statistics.median(seconds), "best": flops / min(seconds)}
