"""Tokens that leave a memory as it is: nothing written, nothing forgotten.

Hard gates are exactly zero over most of a long text, and what would be written there need not be computed. To ask would
make other devices than the CPU wait, and in training a gate's gradient is not zero where the gate is.

Shapes: B batch, T tokens, H heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atlas_memory.ops.optimizers import Gates
from atlas_memory.ops.stability import may_look
from atlas_memory.ops.state import MemoryState
from atlas_memory.spec import MemorySpec

# Stretches of busy tokens begin and end at multiples of this, so that the matrices of a long text have few shapes: on a
# CPU oneDNN keeps memory for every shape that it has multiplied in bfloat16.
GRAIN = 256


def idle(spec: MemorySpec, gates: Gates) -> Tensor | None:
    """Of every token, in the shape of its gates, whether it changes no weights; None: there is no saying.

    (A state begins inside its ball, and what was retracted once stays as it is at the next chunk's end. Exact memories
    may be taken in other chunks than they are retracted at.)
    """
    changes = spec.carries_momentum or spec.kernel or (spec.exact and spec.retracts)
    return None if changes else _still(spec, gates)


def busy_tokens(spec: MemorySpec, gates: Gates, state: MemoryState) -> tuple[int, int] | None:
    """Begin and end of the tokens of gates (B, T, H) that have to be worked on; None: there is no saying.

    Before and after them no row writes, and the state after them is that after all. Both lie on the chunk grid.
    (Weights that were retracted would be again at each chunk's end, which changes them by no more than rounding; Muon's
    momentum fades: `faded_momentum`.) There is no saying of memories with infinite features, which keep every token.
    """
    still = None if spec.kernel or not _at_rest(spec, state) else _still(spec, gates)
    if still is None:
        return None
    tokens, history, grain = still.shape[1], spec.window - 1, math.lcm(GRAIN, spec.anchor_chunk)
    if tokens == 0 or tokens % spec.anchor_chunk:
        return None
    places = still.logical_not().any(-1).any(0).nonzero()
    begin, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (tokens, 0)
    if history or (end and spec.carries_momentum):  # the last window is part of the state; momentum goes on by itself
        end = tokens
    if not end:
        return 0, 0
    return max(begin - history, 0) // grain * grain, min(-(-end // grain) * grain, tokens)


def faded_momentum(spec: MemorySpec, gates: Gates, state: MemoryState) -> dict[str, Tensor]:
    """Leaves of the state after tokens that nothing is written at: Muon's momentum, which no step has asked for."""
    if spec.optimizer != "muon" or gates.momentum is None:
        return {}
    left = gates.momentum.prod(1)[..., None, None]  # (B, H, 1, 1)
    return {f"momentum.{site}": momentum * left for site, momentum in state.group("momentum").items()}


def _still(spec: MemorySpec, gates: Gates) -> Tensor | None:
    """Where a token neither writes nor forgets; None: there is no saying."""
    step, retention = gates.step, gates.retention
    if step is None or torch.is_grad_enabled() or not may_look(step):
        return None
    still = step == 0
    if spec.optimizer == "muon":  # its momentum gathers also what no step asks for
        if gates.window is None:
            return None
        still = still & (gates.window == 0).all(-1)
    return still if retention is None else still & (retention == 1)


def _at_rest(spec: MemorySpec, state: MemoryState) -> bool:
    """Whether nothing that was read before is still to be written: no open chunk, no momentum, no step of Muon's."""
    moving = [state.tensors["pending"]] if spec.optimizer == "muon" else list(state.group("momentum").values())
    return not any(state.fill) and all(may_look(x) and not bool(x.any()) for x in moving)
