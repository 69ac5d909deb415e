"""The three guards of docs/method.md §9: they are part of the definition, so the reference uses them too.

safe inputs      normalisations that neither overflow nor divide by zero
write limiter    ℓ_t, so that one chunk of gradients taken at one anchor cannot overshoot
retraction       chunk ends are drawn back into a ball, and gradients through them likewise: see dense.retract

Shapes: R rows (batch × heads), C tokens of the chunk, N tokens whose gradients it uses (window and chunk).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Gradients of a state are drawn back to this norm at chunk ends. A chain of expanding chunks can multiply gradients
# without bound; at this size they carry no information, and float32 holds a few more products of such numbers.
LARGEST_GRADIENT = 1e12


def may_look(x: Tensor) -> bool:
    """Whether the host can see numbers without waiting for a device. Guards that see nothing to do save their passes;
    those that cannot see give the same numbers, bit for bit."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def harmless(dtype: torch.dtype) -> float:
    """Rows with entries up to this size, and up to a million of them, have squares that can be summed."""
    return float(torch.finfo(dtype).max) ** 0.5 * 2.0**-20


def _all_below(x: Tensor, bound: float) -> bool:
    if not may_look(x) or x.numel() == 0:
        return False
    smallest, largest = torch.aminmax(x.detach())
    return -bound <= float(smallest) and float(largest) <= bound


def all_finite(x: Tensor) -> bool:
    """In one pass: the smallest and the largest of numbers are finite only if all of them are."""
    return x.numel() == 0 or all(math.isfinite(bound) for bound in torch.aminmax(x.detach()))


def magnitude(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Largest absolute entry, as a constant to scale by: it cancels mathematically, so no gradient is needed."""
    absolute = x.detach().abs()
    return absolute.amax(dim=dim, keepdim=True) if x.numel() else absolute.sum(dim=dim, keepdim=True)


def safe_norm(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Euclidean norm that does not overflow, with zero gradient at zero. Keeps the dimensions."""
    scale = magnitude(x, dim).clamp_min(torch.finfo(x.dtype).tiny)
    return torch.linalg.vector_norm(x / scale, dim=dim, keepdim=True) * scale


def normalise(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """x / √(‖x‖² + ε²) over the last dimension, for any finite x."""
    if _all_below(x, harmless(x.dtype)):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon**2)
    scale = _overflowing(x)
    scaled = x / scale
    return scaled * torch.rsqrt(scaled.square().sum(-1, keepdim=True) + (epsilon / scale).square())


def root_mean_square_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    """RMSNorm over the last dimension, for any finite x."""
    if _all_below(x, harmless(x.dtype)):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight
    scale = _overflowing(x)
    scaled = x / scale
    return scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + epsilon / scale.square()) * weight


def _overflowing(x: Tensor) -> Tensor:
    """The magnitude of rows whose squares might overflow, 1 for all others."""
    scale = magnitude(x, -1)
    return torch.where(scale > harmless(x.dtype), scale, 1)


def cap(x: Tensor, limit: float) -> Tensor:
    """x · min(1, limit/‖x‖) over the last dimension: exact identity below the limit.

    Above it, no product on the way forward or back contains x itself, which may be as large as numbers get.
    """
    if limit > torch.finfo(x.dtype).max:  # no number of half precision: a quotient with it would be infinite
        return cap(x.float(), limit).to(x.dtype)
    if _all_below(x, limit / x.shape[-1] ** 0.5):
        return x
    scale = magnitude(x, -1).clamp_min(torch.finfo(x.dtype).tiny)
    unit = x / scale
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True).clamp_min(0.5)  # at least 1, but for x = 0
    inside = scale * norm <= limit * (1 + 64 * torch.finfo(x.dtype).eps)  # as in shrink_factor
    return torch.where(inside, x, unit * (limit / norm))


def shrink_factor(norm: Tensor, limit: float) -> Tensor:
    """min(1, limit / norm). What was shrunk to the limit once counts as inside it, whatever the rounding."""
    inside = norm <= limit * (1 + 64 * torch.finfo(norm.dtype).eps)
    return norm.new_full((), limit) / norm.masked_fill(inside, limit)  # a quotient, not a product: exactly 1 inside


def surprise_weighted(retention: Tensor, surprise: Tensor, scale: float) -> Tensor:
    """α^g with g = 2s/(s + scale): nothing is forgotten for what was expected, α² at most for what was not."""
    exponent = 2 * surprise / (surprise + scale)
    return torch.exp(exponent * torch.log(retention.clamp_min(torch.finfo(retention.dtype).tiny)))


def write_limit(step: Tensor, written: Tensor, gram: Tensor, curvature: Tensor | None) -> Tensor:
    """ℓ_t = 1/max(1, λ_t) of one fast layer. Returns (R, C).

    step (R, C, N): how far token t's state has moved along each gradient, P + σB; written: 1 where it has, else 0. gram
    (R, N, N): absolute inner products of the layer's inputs, weighted with the sensitivities of the layers above.
    curvature (R, 1) or None: what those layers add at the anchor. λ_t is Gershgorin's bound on the largest eigenvalue
    of the step: its largest row sum, over the tokens that are written at all.
    """
    row_sums = (torch.bmm(step, gram) * written).amax(-1)
    return shrink_factor(row_sums if curvature is None else row_sums * curvature, 1.0)


def step_limit(
    size: Tensor, step: Tensor, momentum: Tensor, inputs: Tensor, weights: Tensor, curvature: Tensor | None
) -> Tensor:
    """ℓ of Muon's steps: never past the minimum of the windowed loss along the step. Returns (R, K).

    An orthogonalised step has the same size however small the error; unlimited, it would circle around the minimum.
    Along step O (R, K, out, in) the loss falls by size·⟨S, O⟩ and rises by size²/2 Σ_i w_i ‖O x_i‖², with S the
    momentum and w (R, K, N) the weights of the inputs x (R, N, in) in it. size (R, K); curvature (R, 1) as in
    `write_limit`.
    """
    slope = inner(momentum, step)[..., 0, 0]
    bend = ((step @ inputs.mT[:, None]).square().sum(-2) * weights).sum(-1)
    bend = bend if curvature is None else bend * curvature
    return shrink_factor(size * bend / (slope + torch.finfo(slope.dtype).eps), 1.0)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of matrices (..., M, N): (..., 1, 1). No product of their size is made on the way."""
    return torch.einsum("...mn,...mn->...", x, y)[..., None, None]


def squared_norm_bound(weight: Tensor) -> Tensor:
    """A bound on ‖W‖₂² of weight (R, M, N), with M the short side: largest row sum of |W Wᵀ|. Returns (R, 1).

    For a random matrix it is within a factor of two or three; the Frobenius norm is off by the rank.
    """
    return torch.bmm(weight, weight.mT).abs().sum(-1).amax(-1, keepdim=True)
