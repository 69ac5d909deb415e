"""A piece of work that is run forward only, or forward and backward, and measured. Imports torch and nothing else, so
that a peer's environment can use it too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor


class Work:
    """forward: does the work, and returns what is differentiated. leaves: what gets a gradient."""

    def __init__(self, forward: Callable[[], Tensor], leaves: Iterable[Tensor]) -> None:
        self.forward, self.leaves = forward, list(leaves)

    def run(self, backward: bool) -> float:
        """One repetition, in seconds."""
        for leaf in self.leaves:
            leaf.grad = None
        gc.collect()
        start = time.perf_counter()
        if backward:
            self.forward().square().mean().backward()
        else:
            with torch.no_grad():
                self.forward()
        return time.perf_counter() - start

    def peak_bytes(self, backward: bool) -> int:
        """The most memory one repetition holds above what the process held before it."""
        gc.collect()
        before = _status_bytes("VmRSS")
        return high_water_after(lambda: self.run(backward)) - before


def high_water_after(work: Callable[[], object]) -> int:
    """The most memory the process holds while it does this."""
    _reset_high_water()
    work()
    return _status_bytes("VmHWM")


def _reset_high_water() -> None:
    # ru_maxrss would not do: Linux hands the parent's maximum on to its children.
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: peak memory can be measured on Linux only.")
