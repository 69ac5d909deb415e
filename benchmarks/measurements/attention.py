"""The infinite features: attention as a memory, beside PyTorch's own."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from benchmarks.registry import Measured, Run, Target, at_most, measurement
from benchmarks.subjects import STANDARD, Arguments, infinite_arguments
from benchmarks.timing import interleave, ratio
from benchmarks.work import Work

REPETITIONS = 15
COMPARED: dict[str, Target | None] = {"transformer": at_most(1.3), "deep_transformer": None, "swdt": None, "dot": None}


def plain_attention(arguments: Arguments) -> Work:
    """scaled_dot_product_attention of the same tokens, causal."""

    def forward() -> torch.Tensor:
        heads_first = (x.movedim(2, 1) for x in (arguments.queries, arguments.keys, arguments.values))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True)

    return Work(forward, [arguments.queries, arguments.keys, arguments.values])


def against_attention(preset: str, run: Run) -> Measured:
    arguments = infinite_arguments(preset, STANDARD)
    candidates = {"ours": arguments.work(), "attention": plain_attention(arguments)}
    seconds = interleave(
        {name: functools.partial(work.run, backward=True) for name, work in candidates.items()},
        run.repetitions(REPETITIONS),
    )
    return Measured(ratio(seconds, "ours", "attention"), {"seconds": seconds})


for _preset, _target in COMPARED.items():
    measurement(
        f"attention.{_preset}",
        f"`{_preset}`, the operator, against scaled_dot_product_attention, {STANDARD.tokens:,} tokens: time, "
        "forward + backward",
        "×",
        _target,
    )(functools.partial(against_attention, _preset))
