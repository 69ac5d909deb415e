"""Muon with an update at every token, against the same written with plain autograd."""

from __future__ import annotations

import sys
from functools import partial

import torch

from atlas_memory.ops import memorize
from benchmarks import plain_muon
from benchmarks.child import Child
from benchmarks.registry import Measured, Run, at_least, at_most, measurement
from benchmarks.subjects import muon_arguments, sized
from benchmarks.timing import interleave, ratio

# Plain autograd keeps 17 MB per token of the batch row: the longest sequence that fits in 16 GB with room to spare, and
# a short one for the time.
LONG, SHORT = 512, 128


@measurement(
    "muon.plain_time",
    "Muon at every token, no limiter, against plain autograd through Newton–Schulz: speed, forward + backward",
    "×",
    at_least(1.5),
)
def plain_time(run: Run) -> Measured:
    arguments = muon_arguments(sized(SHORT))
    works = {"memorize": arguments.work(memorize), "plain": arguments.work(plain_muon.memorize)}
    with torch.no_grad():
        answers = [work.forward() for work in works.values()]
        torch.testing.assert_close(*answers, rtol=1e-3, atol=1e-3)  # the same function, or no comparison
    seconds = interleave({name: partial(work.run, True) for name, work in works.items()}, run.repetitions(5))
    return Measured(ratio(seconds, "plain", "memorize"), {"seconds": seconds}, f"T={SHORT}")


@measurement(
    "muon.plain_memory",
    "Muon at every token, no limiter, against plain autograd through Newton–Schulz: peak memory, forward + backward",
    "1/",
    at_most(1 / 8),
)
def plain_memory(run: Run) -> Measured:
    """Ours holds one chunk, however long the sequence; plain autograd holds all of them: both lengths are told."""
    lengths = (SHORT,) if run.quick else (SHORT, LONG)
    peaks = {tokens: {name: _peak(tokens, name == "plain") for name in ("memorize", "plain")} for tokens in lengths}
    ratios = {tokens: peak["memorize"] / peak["plain"] for tokens, peak in peaks.items()}
    note = ", ".join(f"T={tokens}: {value:.3f}" for tokens, value in ratios.items())
    return Measured(ratios[lengths[-1]], {"bytes": peaks}, note)


def _peak(tokens: int, plain: bool) -> int:
    with Child(sys.executable, "benchmarks.subjects:every_token_muon", tokens=tokens, plain=plain) as child:
        peak: int = child.call("peak_bytes", backward=True)
    return peak
