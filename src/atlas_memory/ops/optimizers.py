"""Gates → coefficients. Inside a chunk every optimizer is a fixed linear combination of the tokens' gradients.

gd, momentum   S_t = θ_t S_{t−1} + η_t Σ_j γ_tj ∇_{t−j}      W_t = α_t W_{t−1} − S_t                   (gd: θ = 0)
Muon           S_t = θ_t S_{t−1} +     Σ_j γ_tj ∇_{t−j}      W_t = α_t W_{t−1} − [update point] η̄_t NS(S_t)

Unrolled from the anchor (docs/method.md, "chunk-parallel form"):

    W_t = a_t W − σ_t S − Σ_i P_ti ∇_i       S_t = τ_t S + Σ_i B_ti ∇_i

Shapes: leading dimensions (...), C tokens of the chunk, W window width, N = C + W − 1 tokens whose gradients it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Gates(NamedTuple):
    """What every token decides. None: the constant that leaves the term out of the equations."""

    retention: Tensor | None = None  # α (..., T); None: 1
    momentum: Tensor | None = None  # θ (..., T); None: 0
    step: Tensor | None = None  # η (..., T); None: 1
    window: Tensor | None = None  # γ (..., T, W), offset 0 first; None: 1


class Coefficients(NamedTuple):
    """Of the chunk's tokens, as rows. None: the term is absent."""

    weight: Tensor  # a (..., C)
    crossing: Tensor | None  # σ (..., C): from the anchor's momentum into the weights
    momentum: Tensor | None  # τ (..., C)
    writes: Tensor  # P (..., C, N)
    gathers: Tensor | None  # B (..., C, N)

    def map(self, function: Callable[[Tensor], Tensor]) -> Coefficients:
        leaves: list[Any] = [None if leaf is None else function(leaf) for leaf in self]
        return Coefficients(*leaves)

    def steps(self) -> Tensor:
        """P + σB: what bounds the move along each gradient, now and by the momentum it leaves (write limiter)."""
        if self.crossing is None or self.gathers is None:
            return self.writes
        return self.writes + self.crossing[..., None] * self.gathers


def linear_coefficients(gates: Gates, like: Tensor, columns: int) -> Coefficients:
    """Coefficients of gd and momentum. `like` (..., C, ?) gives leading shape, dtype and device; `columns` is N."""
    decay = decay_matrix(gates.retention, like)
    weight = anchor_decay(gates.retention, decay, like)
    if gates.momentum is None:
        return Coefficients(weight, None, None, _spread(decay, gates, gates.step, like, columns), None)
    momentum_decay = decay_matrix(gates.momentum, like)
    momentum = anchor_decay(gates.momentum, momentum_decay, like)
    gathers = _spread(momentum_decay, gates, gates.step, like, columns)
    crossing = (decay @ momentum[..., None])[..., 0]
    return Coefficients(weight, crossing, momentum, decay @ gathers, gathers)


def _spread(decay: Tensor, gates: Gates, step: Tensor | None, like: Tensor, columns: int) -> Tensor:
    """decay · diag(step) · Γ (..., C, N): what every token's state has gathered of every gradient."""
    scaled = decay.expand(*like.shape[:-1], -1) if step is None else decay * step[..., None, :]
    if columns == like.shape[-2] and gates.window is None:  # a window of one: Γ is the identity
        return scaled
    return scaled @ window_bands(gates, like, columns)


class MuonCoefficients(NamedTuple):
    """Muon's, of the chunk's tokens as rows: W_t = a_t W − Σ_u D_tu NS(S_u) over the update points u, S_t as above."""

    weight: Tensor  # a (..., C)
    momentum: Tensor  # τ (..., C)
    gathers: Tensor  # B (..., C, N)
    updates: Tensor  # D (..., C, K): η̄_u and the decay since u, zero before u
    since: Tensor  # (..., C): the decay since the last update point, or since the anchor
    pending: Tensor  # (..., C): the steps gathered since the last update point

    def map(self, function: Callable[[Tensor], Tensor]) -> MuonCoefficients:
        return MuonCoefficients(*(function(leaf) for leaf in self))


def muon_coefficients(
    gates: Gates, pending: Tensor, update_points: range, like: Tensor, columns: int
) -> MuonCoefficients:
    """`pending` (...): what the chunk before left of its open interval. `update_points`: places in this chunk."""
    tokens, device = like.shape[-2], like.device
    decay = decay_matrix(gates.retention, like)
    weight = anchor_decay(gates.retention, decay, like)
    momentum_decay = decay_matrix(gates.momentum, like)
    # Intervals are numbered; the update point itself closes its own (interval) and starts what follows (group).
    place = torch.arange(tokens, device=device)
    first, interval_length = update_points.start, update_points.step
    point = ((place >= first) & ((place - first) % interval_length == 0)).long()
    group = point.cumsum(0)
    interval = group - point
    same_interval = (interval[:, None] == interval).to(like.dtype)
    step = torch.ones_like(weight) if gates.step is None else gates.step
    gathered = ((decay * same_interval) @ step[..., None])[..., 0]
    gathered = gathered + torch.where(interval == 0, weight * pending[..., None], 0)
    since = weight
    if update_points:
        last_point = first + interval_length * (group - 1).clamp_min(0)
        at_point = decay.gather(-1, last_point[:, None].expand(*decay.shape[:-1], 1))[..., 0]
        since = torch.where(group == 0, weight, at_point)
    return MuonCoefficients(
        weight,
        anchor_decay(gates.momentum, momentum_decay, like),
        _spread(momentum_decay, gates, None, like, columns),
        decay[..., first::interval_length] * gathered[..., None, first::interval_length],
        since,
        torch.where(point == 1, 0, gathered),
    )


def window_bands(gates: Gates, like: Tensor, columns: int) -> Tensor:
    """Γ (..., C, N): γ_tj stands at column t + W − 1 − j, so that token t sees the W tokens up to itself."""
    tokens = like.shape[-2]
    width = columns - tokens + 1
    if gates.window is None:
        offsets = torch.arange(columns, device=like.device) - torch.arange(tokens, device=like.device)[:, None]
        return ((offsets >= 0) & (offsets < width)).to(like.dtype).expand(*like.shape[:-1], columns)
    # Rows of W gates and C zeros, laid end to end and cut into rows of N: each row starts one place further right.
    padded = torch.cat([gates.window.flip(-1), like.new_zeros(*gates.window.shape[:-1], tokens)], dim=-1)
    flat = padded.flatten(-2)[..., : tokens * columns]
    return flat.unflatten(-1, (tokens, columns))


def decay_matrix(gate: Tensor | None, like: Tensor) -> Tensor:
    """D (..., C, C) with D_ts = Π_{s<l≤t} gate_l for s ≤ t, zero above. Exact, with exact gradients, for gates of 0."""
    tokens = like.shape[-2]
    if gate is None:
        return torch.ones(tokens, tokens, dtype=like.dtype, device=like.device).tril()
    result: Tensor = _DecayMatrix.apply(gate)
    return result


def anchor_decay(gate: Tensor | None, decay: Tensor, like: Tensor) -> Tensor:
    """Π_{l≤t} gate_l (..., C): what is left of the anchor at each token."""
    if gate is None:
        return torch.ones(like.shape[:-1], dtype=like.dtype, device=like.device)
    return decay[..., 0] * gate[..., :1]


class _DecayMatrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor) -> Tensor:
        tokens = gate.shape[-1]
        below = torch.ones(tokens, tokens, dtype=torch.bool, device=gate.device).tril(-1)
        decay = torch.where(below, gate[..., None], 1).cumprod(-2).tril()
        ctx.save_for_backward(decay)
        return decay

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # ∂D_ts/∂gate_l = D_tl D_(l−1)s: the product without its l-th factor, whether or not that factor is zero
        (decay,) = ctx.saved_tensors
        towards = gradients[0] @ decay.mT  # (t, l−1)
        shifted = torch.cat([torch.zeros_like(towards[..., :1]), towards[..., :-1]], dim=-1)
        return (decay * shifted).sum(-2)
