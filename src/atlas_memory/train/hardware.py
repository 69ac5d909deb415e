"""Accelerators as data, and this machine as one of them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One accelerator, and how it is connected; bytes and FLOPs per second are one accelerator's, in one direction."""

    name: str
    flops: float  # of large matrix products, in the precision of training
    bandwidth: float  # of its memory
    memory: float  # bytes
    launch: float  # seconds of the host for one operation
    asynchronous: bool  # the host goes ahead: launches hide behind work, or work behind launches
    link: float = float("inf")  # to accelerators of the same node
    network: float = float("inf")  # to other nodes
    per_node: int = 1
    efficiency: float = 1.0  # of `flops`, what products reach in practice

    def ring(self, accelerators: int) -> float:
        """Bytes per second of a collective: rings of all cards of a node share the work among the network's ports."""
        return self.link if accelerators <= self.per_node else min(self.link, self.per_node * self.network)


# Peaks are the vendors', dense bfloat16; nodes of eight with one 200 or 400 Gbit/s port a card. Launches: what an
# operation of PyTorch costs the host with autograd, several microseconds on any machine. Efficiency: an assumption.
HARDWARE: dict[str, Hardware] = {
    row.name: row
    for row in (
        Hardware("a100-40", 312e12, 1.56e12, 40e9, 6e-6, True, 300e9, 25e9, 8, 0.6),
        Hardware("a100-80", 312e12, 2.0e12, 80e9, 6e-6, True, 300e9, 25e9, 8, 0.6),
        Hardware("h100", 989e12, 3.35e12, 80e9, 6e-6, True, 450e9, 50e9, 8, 0.5),
    )
}
THIS_MACHINE = "this-machine"


def find_hardware(name: str) -> Hardware:
    """A row of the table, or this machine, which is measured now."""
    if name == THIS_MACHINE:
        return this_machine()
    if name not in HARDWARE:
        raise ValueError(f"hardware={name!r} is unknown; known: {', '.join([*HARDWARE, THIS_MACHINE])}.")
    return HARDWARE[name]


def this_machine(repetitions: int = 15) -> Hardware:
    """The CPU, in float32: products, copies and small operations are timed, for about a second."""
    a, b = torch.randn(2, 768, 768)
    source, target = torch.randn(2, 4_000_000)
    small = torch.randn(8, requires_grad=True)

    def many_small() -> None:
        y = small
        for _ in range(100):
            y = y * small
        y.sum().backward()

    return Hardware(
        name=THIS_MACHINE,
        flops=2 * 768**3 / _seconds(lambda: a @ b, repetitions),
        bandwidth=2 * source.nbytes / _seconds(lambda: target.copy_(source), repetitions),
        memory=_physical_memory(),
        launch=_seconds(many_small, repetitions) / 400,  # one product forward, two and a sum of them backward
        asynchronous=False,
    )


def _seconds(work: Callable[[], object], repetitions: int) -> float:
    """The median, after one that is not counted."""
    taken = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _physical_memory() -> float:
    information = Path("/proc/meminfo")
    if not information.is_file():
        return float("inf")
    return float(information.read_text().split("MemTotal:")[1].split()[0]) * 1024
