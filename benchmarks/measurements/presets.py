"""Tokens per second of every preset at its own widths, with the machine's matmul speed in the same run."""

from __future__ import annotations

import statistics
from functools import partial

from atlas_memory import presets
from benchmarks.registry import Measured, Run, measurement
from benchmarks.subjects import STANDARD, default_layer
from benchmarks.timing import interleave, matmul, matmul_flops_per_second


def speed(run: Run, preset: str, backward: bool) -> Measured:
    candidates = {"layer": partial(default_layer(preset).run, backward), "matmul": matmul()}
    seconds = interleave(candidates, run.repetitions(7))
    peak = matmul_flops_per_second(seconds["matmul"])
    tokens = STANDARD.batch * STANDARD.tokens / statistics.median(seconds["layer"])
    return Measured(tokens, {"seconds": seconds, "matmul_flops_per_second": peak})


for preset in presets.names():
    for passes, backward in (("forward", False), ("forward_backward", True)):
        words = f"`{preset}`, layer of width {STANDARD.dim}, {passes.replace('_', ' + ')}"
        measurement(f"presets.{preset}.{passes}", words, "tokens/s")(partial(speed, preset=preset, backward=backward))
