"""Against the machine's own matrix product: how much of it reaches the algorithm."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.flops import chunk_products, forward_flops
from benchmarks.registry import Measured, Run, at_least, measurement
from benchmarks.subjects import STANDARD, operator_arguments
from benchmarks.timing import interleave, matmul, matmul_flops_per_second


def fraction(run: Run, backward: bool) -> Measured:
    """Necessary operations per second of `memorize`, over those of a 2048³ float32 product in the same run."""
    arguments = operator_arguments("titans")
    candidates = {"memorize": partial(arguments.work().run, backward), "matmul": matmul()}
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


for passes, backward, wanted in (("forward", False, 0.45), ("forward_backward", True, 0.40)):
    measurement(
        f"matmul_fraction.{passes}",
        f"fraction of matmul speed, `memorize` of `titans`, necessary operations only, {passes.replace('_', ' + ')}",
        "%",
        at_least(wanted),
    )(partial(fraction, backward=backward))
