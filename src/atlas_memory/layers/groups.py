"""Packed sequences of very different lengths, read in groups of like length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from atlas_memory.layers.states import BlockState
from atlas_memory.ops import MemoryState
from atlas_memory.ops.packing import Packing

State = TypeVar("State", MemoryState, BlockState)


def read_in_groups(
    read: Callable[[Packing, Tensor, State | None], tuple[Tensor, State]],
    join: Callable[[Sequence[State]], State],
    packing: Packing,
    x: Tensor,
    state: State | None,
) -> tuple[Tensor, State]:
    """What `read` answers of x (B, T, ...), by groups of its sequences. join: of the groups' states, row below row."""
    groups = packing.groups()
    if len(groups) == 1:
        return read(packing, x, state)
    sequences = x.split(packing.lengths, dim=1)
    answers: dict[int, Tensor] = {}
    states = []
    for numbers in groups:
        part = packing.part(numbers)
        together = torch.cat([sequences[number] for number in numbers], dim=1)
        y, after = read(part, together, None if state is None else state.select(numbers))
        answers |= zip(numbers, y.split(part.lengths, dim=1), strict=True)
        states.append(after)
    order = [number for numbers in groups for number in numbers]
    back = sorted(range(packing.rows), key=order.__getitem__)
    return torch.cat([answers[number] for number in range(packing.rows)], dim=1), join(states).select(back)
