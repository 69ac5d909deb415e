"""What every token decides: retention α, momentum θ, step η, and the window's γ, each from the token's own input.

Shapes: B batch, T tokens, H heads, W window; gate values (B, T, H), the window's (B, T, H, W).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from atlas_memory.ops.optimizers import Gates
from atlas_memory.spec import MemorySpec

# A hard gate is a sigmoid stretched by this much on both sides and clamped: exact 0 and 1 lie at finite logits, and
# the slope inside is not zero. 0.1 puts them at logits of ±2.4.
STRETCH = 0.1

# Where gates start.
#
# Retention: a head that keeps α = 1 − f halves its memory in ln 2 / f tokens; the first head starts at 7 thousand
# tokens and the last at 70 thousand, so that facts survive a long document before anything is learned, and heads
# differ.
FORGETTING = (1e-4, 1e-5)
# Momentum: a token is written mostly when it is read. What is left of it is written together with the next one, be it
# noise: from θ = 0.5 and η = 0.1, `titans` recalls 30 % after the steps that bring it to 96 % from here
# (docs/findings.md).
MOMENTUM, MOMENTUM_STEP = 0.1, 0.2
# Step: a tenth of the error. Reads are normalised, so that weakly written facts are read as well as strong ones, but
# strongly written noise erases them: before the gate has learned to tell them apart, less is more.
STEP = 0.1
# Muon looks at its momentum only once per interval, and must still see the interval's first tokens there: the gate
# starts at 1 − 1/r, and θ at that share of the largest momentum. With r = b = 64 the first token then counts 14 % of
# the last; an interval of several chunks sees about its last one. η̄, the steps' sum over an interval, starts at one,
# and η at a tenth at most. Twice that is the largest: steps of eight, which open gates would make in an interval of
# eight, destroy more than they write (docs/findings.md).
MUON_STEP, LARGEST_MUON_STEP = 1.0, 2.0
# Window: a token's own gradient counts fully, older ones little, since each was already written when it was new.
WINDOW = (0.9, 0.1)
# Under Muon γ alone says how strongly a token is written. Half open, it is still below the floor of Newton–Schulz,
# where writes are in proportion to it; above, singular values are equal whatever γ is, noise erases facts, and no
# gradient says so.
MUON_WINDOW = (0.5, 0.1)
# Hard gates: nearer to zero, a part of them would be shut from the start by the spread of their inputs (a fifth at
# 1/64), and what is shut stays shut.
LEAST_HARD = 0.1


class TokenGates(nn.Module):
    """x (B, T, dim) → Gates of a spec."""

    def __init__(self, spec: MemorySpec, dim: int, heads: int) -> None:
        super().__init__()
        self.spec, self.heads = spec, heads
        starts = _starting_values(spec, heads)
        self.names = list(starts)
        self.widths = [start.shape[1] for start in starts.values()]
        self.projection = nn.Linear(dim, heads * sum(self.widths)) if starts else None
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=0.02)
            logits = torch.cat([_logit(start, spec.gates) for start in starts.values()], dim=1)
            with torch.no_grad():
                self.projection.bias.copy_(logits.flatten())

    def forward(self, x: Tensor) -> Gates:
        if self.projection is None:
            return Gates()
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        logits = self.projection(x).to(dtype).unflatten(-1, (self.heads, -1))
        values = dict(zip(self.names, _open(logits, self.spec.gates).split(self.widths, dim=-1), strict=True))
        gates = {name: value if name == "window" else value[..., 0] for name, value in values.items()}
        if "momentum" in gates:
            gates["momentum"] = gates["momentum"] * self.spec.largest_momentum
        if "step" in gates:
            gates["step"] = gates["step"] * largest_step(self.spec)
        if self.spec.tie_retention:  # forget in proportion to what is written: where η = 0, α = 1
            gates["retention"] = 1 - gates["step"] * (1 - gates["retention"])
        return Gates(**gates)


def largest_step(spec: MemorySpec) -> float:
    """η of a gate that is open."""
    return min(1.0, LARGEST_MUON_STEP / spec.interval) if spec.optimizer == "muon" else 1.0


def _starting_values(spec: MemorySpec, heads: int) -> dict[str, Tensor]:
    """{gate: (H, width)}, in the order of the logits. Gates that a spec holds constant are absent."""
    values: dict[str, Tensor] = {}
    if spec.retention == "learned":
        fast, slow = (math.log10(rate) for rate in FORGETTING)
        forgetting = torch.logspace(fast, slow, heads, dtype=torch.float64)
        values["retention"] = 1 - forgetting[:, None]
    if spec.carries_momentum:
        momentum = max(MOMENTUM, 1 - 1 / spec.interval) if spec.optimizer == "muon" else MOMENTUM
        values["momentum"] = torch.full((heads, 1), momentum, dtype=torch.float64)
    if spec.step == "learned":
        steps = {"gd": STEP, "momentum": MOMENTUM_STEP, "muon": min(STEP, MUON_STEP / spec.interval)}
        step = steps[spec.optimizer] / largest_step(spec)
        values["step"] = torch.full((heads, 1), step, dtype=torch.float64)
    if spec.window > 1:
        own, older = MUON_WINDOW if spec.optimizer == "muon" else WINDOW
        values["window"] = torch.tensor([own] + [older] * (spec.window - 1), dtype=torch.float64).expand(heads, -1)
    if spec.gates == "hard":
        values = {name: value.clamp_min(LEAST_HARD) for name, value in values.items()}
    return values


def _open(logits: Tensor, kind: str) -> Tensor:
    smooth = torch.sigmoid(logits)
    if kind == "smooth":
        return smooth
    opened: Tensor = _ClampWithWayDown.apply(smooth * (1 + 2 * STRETCH) - STRETCH)
    return opened


class _ClampWithWayDown(torch.autograd.Function):
    """clamp(x, 0, 1). Above 1 the gradient still passes if a step against it leads down.

    A plain clamp has none there: a gate that is exactly 1 for facts and noise alike could never be closed for the
    noise, however much is asked for it. Below 0 there is none, as with a plain clamp: gates that are shut stay shut,
    where the noise of training would keep them all a little open.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        return gradient.masked_fill((x < 0) | ((x > 1) & (gradient < 0)), 0)


def _logit(value: Tensor, kind: str) -> Tensor:
    """The logit at which a gate has this value."""
    return torch.logit(value if kind == "smooth" else (value + STRETCH) / (1 + 2 * STRETCH))
