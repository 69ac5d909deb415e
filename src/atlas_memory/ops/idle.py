"""Tokens that leave a memory as it is: nothing written, nothing forgotten.

Hard gates are exactly zero over most of a long text, and what would be written there need not be computed. To ask would
make other devices than the CPU wait, and in training a gate's gradient is not zero where the gate is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atlas_memory.ops.optimizers import Gates
from atlas_memory.ops.stability import may_look
from atlas_memory.spec import MemorySpec

# Stretches of busy tokens begin and end at multiples of this, so that the matrices of a long text have few shapes: on a
# CPU oneDNN keeps memory for every shape that it has multiplied in bfloat16.
GRAIN = 256


def idle(spec: MemorySpec, gates: Gates) -> Tensor | None:
    """Of every token, in the shape of its gates, whether it is idle; None: there is no saying."""
    step, retention = gates.step, gates.retention
    changes = spec.carries_momentum or spec.retracts or spec.kernel or not spec.exact
    if step is None or changes or torch.is_grad_enabled() or not may_look(step):
        return None
    still = step == 0
    return still if retention is None else still & (retention == 1)


def busy_tokens(spec: MemorySpec, gates: Gates) -> tuple[int, int] | None:
    """Begin and end of the tokens of gates (B, T, H) before and after which no row writes; None: there is no saying.

    Of memories whose windows hold more than a token there is none, as later tokens write what they hold.
    """
    still = idle(spec, gates) if spec.window == 1 else None
    if still is None or still.shape[1] == 0:
        return None
    busy = still.logical_not().any(-1).any(0).nonzero()
    if not len(busy):
        return 0, 0
    first, last = int(busy[0]), int(busy[-1])
    return first // GRAIN * GRAIN, min((last // GRAIN + 1) * GRAIN, still.shape[1])
