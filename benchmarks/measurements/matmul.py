"""Against the machine's own matrix product: how much of it reaches the algorithm."""

from __future__ import annotations

import itertools
import statistics
from functools import partial

import torch

from atlas_memory.ops import memorize
from benchmarks.flops import chunk_products, forward_flops
from benchmarks.registry import Measured, Run, at_least, measurement
from benchmarks.subjects import STANDARD, operator_arguments
from benchmarks.timing import interleave, matmul, matmul_flops_per_second


def fraction(run: Run, backward: bool, compiled: bool) -> Measured:
    """Necessary operations per second of `memorize`, over those of a 2048³ float32 product in the same run."""
    arguments = operator_arguments("titans")
    operator = torch.compile(memorize, fullgraph=True, dynamic=False) if compiled else memorize
    candidates = {"memorize": partial(arguments.work(operator).run, backward), "matmul": matmul()}
    seconds = interleave(candidates, run.repetitions(15))
    size = (STANDARD.batch, STANDARD.tokens, STANDARD.heads)
    passes = 3 if backward else 1  # every product has two in the backward pass
    peak = matmul_flops_per_second(seconds["matmul"])
    taken = statistics.median(seconds["memorize"])
    counted = passes * forward_flops(arguments.spec, *size)
    strict = passes * forward_flops(arguments.spec, *size, strict=True)
    raw = {
        "seconds": seconds,
        "flops": counted,
        "flops_strict": strict,
        "products": {product.what: product.flops for product in chunk_products(arguments.spec)},
        "matmul_flops_per_second": peak,
        "fraction_of_best": counted / taken / peak["best"],
    }
    note = f"{100 * strict / taken / peak['median']:.0f} % if triangular products count half"
    return Measured(counted / taken / peak["median"], raw, note)


TARGETS = {"forward": 0.45, "forward_backward": 0.40}
for (passes, wanted), compiled in itertools.product(TARGETS.items(), (False, True)):
    subject, suffix = ("`titans`, compiled", ".compiled") if compiled else ("`titans`", "")
    words = f"{subject}, necessary operations only, {passes.replace('_', ' + ')}"
    measurement(
        f"matmul_fraction.{passes}{suffix}", f"fraction of matmul speed, `memorize` of {words}", "%", at_least(wanted)
    )(partial(fraction, backward=passes == "forward_backward", compiled=compiled))
