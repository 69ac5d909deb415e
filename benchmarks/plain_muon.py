"""Muon with an update at every token, as one writes it with plain autograd: the peer that nobody has published.

    S_t = θ_t S_{t−1} + ∇_t      W_t = α_t W_{t−1} − η_t NS(S_t)      y_t = q_t + W1_t σ(W2_t q_t)         eq. 32–33, 42

Gradients are closed form and taken at the chunk's anchor, and nothing loops over tokens; but the momenta, every
Newton–Schulz iterate and the weights of all tokens of a chunk are tensors, and autograd keeps them. The retraction of
chunk ends is left out: it does not act on these inputs, and without it this code does less than ours. The write limiter
is left out on both sides.

Shapes: B batch, T tokens, H heads, R = B·H rows, C tokens of a chunk, D key width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory import MemorySpec
from atlas_memory.ops import Gates
from atlas_memory.ops.newton_schulz import schedule

Weights = dict[str, Tensor]  # {site: (R, out, in)}, or {site: (R, C, out, in)} of all tokens


def memorize(
    spec: MemorySpec,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    gates: Gates,
    initial: Mapping[str, Tensor],
) -> tuple[Tensor, tuple[Weights, Weights]]:
    """As `atlas_memory.ops.memorize`, for an MLP with GELU, regression, window 1, Muon at every token.

    queries, keys, values (B, T, H, D), gates (B, T, H), initial {site: (H, out, in)}. Returns the answers (B, T, H, D)
    and the last weights and momentum.
    """
    batch, tokens, heads = keys.shape[:3]
    rows = [
        x.transpose(1, 2).flatten(0, 1) for x in (queries, keys, values, gates.retention, gates.momentum, gates.step)
    ]
    weights = {site: weight.repeat(batch, 1, 1) for site, weight in initial.items()}
    momentum = {site: torch.zeros_like(weight) for site, weight in weights.items()}
    answers = []
    for start in range(0, tokens, spec.chunk):
        chunk = [x[:, start : start + spec.chunk] for x in rows]
        answer, weights, momentum = _chunk(spec, weights, momentum, *chunk)
        answers.append(answer)
    joined = torch.cat(answers, dim=1).unflatten(0, (batch, heads)).transpose(1, 2)
    return joined, (weights, momentum)


def _chunk(
    spec: MemorySpec,
    anchor: Weights,
    momentum: Weights,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    retention: Tensor,
    persistence: Tensor,
    step: Tensor,
) -> tuple[Tensor, Weights, Weights]:
    scale = 1 / math.sqrt(0.425 * spec.hidden_width)
    gradients = _gradients(anchor, keys, values, scale)  # {site: (R, C, out, in)}
    momenta = {site: _recurrence(persistence, momentum[site], gradient) for site, gradient in gradients.items()}
    moves = {site: -step[..., None, None] * _orthogonal(spec, m) for site, m in momenta.items()}
    weights = {site: _recurrence(retention, anchor[site], move) for site, move in moves.items()}
    hidden = F.gelu(torch.einsum("rci,rcoi->rco", queries, weights["up"])) * scale
    answers = queries + torch.einsum("rci,rcoi->rco", hidden, weights["down"])
    return answers, _last(weights), _last(momenta)


def _last(stack: Weights) -> Weights:
    return {site: x[:, -1] for site, x in stack.items()}


def _gradients(anchor: Weights, keys: Tensor, values: Tensor, scale: float) -> Weights:
    """∇ of ½‖M(k) − v‖² for every token (R, C, out, in), at the anchor."""
    before = keys @ anchor["up"].mT
    density = torch.exp(-0.5 * before.square()) / math.sqrt(2 * math.pi)
    slope = 0.5 * (1 + torch.erf(before / math.sqrt(2))) + before * density
    hidden = F.gelu(before) * scale
    error = keys + hidden @ anchor["down"].mT - values
    hidden_error = (error @ anchor["down"]) * slope * scale
    return {"up": hidden_error[..., None] * keys[..., None, :], "down": error[..., None] * hidden[..., None, :]}


def _recurrence(gate: Tensor, start: Tensor, impulses: Tensor) -> Tensor:
    """X_t = gate_t X_{t−1} + impulse_t for all tokens: (R, C), (R, out, in), (R, C, out, in) → (R, C, out, in)."""
    log_decay = gate.log().cumsum(-1)  # (R, C)
    between = (log_decay[:, :, None] - log_decay[:, None, :]).exp().tril()  # (R, C, C)
    gathered = (between @ impulses.flatten(2)).view_as(impulses)
    return gathered + log_decay.exp()[..., None, None] * start[:, None]


def _orthogonal(spec: MemorySpec, matrix: Tensor) -> Tensor:
    """Newton–Schulz, unrolled under autograd. (R, C, out, in)."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) * 1.01 + spec.momentum_floor)
    for a, b, c in schedule(spec.newton_schulz_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
