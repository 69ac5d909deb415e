"""The precision texts are read in: one that is named, or the one this machine multiplies matrices in fastest."""

from __future__ import annotations

import time

import torch

from atlas_memory.checks import check_choice

PRECISIONS = ("float32", "bfloat16")  # bfloat16: by autocast, memories stay in float32
AUTO = "auto"

_SIZE, _REPETITIONS = 512, 5


def chosen_precision(name: str, before: str | None = None) -> str:
    """One of PRECISIONS, for `name` or for AUTO; what is chosen is what a report tells.

    before: what was chosen when work began that is gone on with, where speeds may be others.
    """
    check_choice("precision", name, (AUTO, *PRECISIONS))
    if name != AUTO:
        return name
    return before if before in PRECISIONS else PRECISIONS[_half_is_faster()]


def _half_is_faster() -> bool:
    """Processors without such products emulate them, several times slower than float32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """The least of a few: whatever else the machine does only adds to it."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    taken = []
    for _ in range(_REPETITIONS + 1):  # the first one pays for what is made once
        begin = time.perf_counter()
        matrix @ matrix
        taken.append(time.perf_counter() - begin)
    return min(taken)
