"""Matrix memories under the regression objective, without staleness: every gradient at the previous token's state.

Inside a chunk the error of impulse (t, j), token t − j seen in the window of t, is linear in all earlier ones:

    E_tj = d_t (a_{t−1} W x − σ_{t−1} S x − Σ_{s<t, l} P_{t−1,s} ω_sl (x · x_sl) E_sl) − v,      x = φ(k_{t−j})

with ω = ℓηγ and d_t = 1, or α_t for gradients at the decayed state. That is a unit triangular system of C·W unknowns;
its inverse depends on no state, so it is taken for all chunks at once. What remains in the loop is as for linear
attention, with the impulses in the place of tokens.

Shapes: (..., C, W, D) impulses of a chunk; I = C·W of them, flattened; R rows, S chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_memory.ops.entries import unexpired
from atlas_memory.ops.features import Feature
from atlas_memory.ops.optimizers import Coefficients, Gates, anchor_decay, decay_matrix
from atlas_memory.ops.stability import shrink_factor
from atlas_memory.spec import MemorySpec


class ImpulseChunk(NamedTuple):
    """What a chunk needs of its tokens. errors = weight_keys Wᵀ − momentum_keys Sᵀ − targets.

    The features of an infinite layer depend on its entries: there weight_keys are inverse · scale · z, made inside the
    loop.
    """

    inputs: Tensor  # φ(k) (..., I, F), or k itself for an infinite φ
    weight_keys: Tensor | None  # (..., I, F)
    inverse: Tensor | None  # (..., I, I), and
    scale: Tensor | None  # (..., I, 1): for an infinite layer
    momentum_keys: Tensor | None  # (..., I, F)
    targets: Tensor  # (..., I, V)
    coefficients: Coefficients  # over impulses: writes and gathers are (..., C, I)
    window_gates: Tensor  # γ (..., C, W); for the monitors, like
    limits: Tensor | None  # ℓ (..., C), which is already inside the coefficients


def impulse_chunk(spec: MemorySpec, feature: Feature, keys: Tensor, values: Tensor, gates: Gates) -> ImpulseChunk:
    """keys (..., C, W, D), values (..., C, W, V): windows of every token, offset 0 first; gates (..., C)."""
    width = keys.shape[-2]
    like = keys[..., 0, :]
    gamma = torch.ones_like(keys[..., 0]) if gates.window is None else gates.window
    omega = gamma
    if gates.step is not None:
        omega = omega * gates.step[..., None]
    limits = _window_limit(feature, keys, omega, gates.momentum) if spec.limits_writes else None
    if limits is not None:
        omega = omega * limits[..., None]
    decay = decay_matrix(gates.retention, like)
    weight = anchor_decay(gates.retention, decay, like)
    crossing = momentum = gathers = None
    impulse_decay = decay
    if gates.momentum is not None:
        momentum_decay = decay_matrix(gates.momentum, like)
        momentum = anchor_decay(gates.momentum, momentum_decay, like)
        crossing = (decay @ momentum[..., None])[..., 0]
        impulse_decay = decay @ momentum_decay
        gathers = (momentum_decay[..., None] * omega[..., None, :, :]).flatten(-2)
    writes = (impulse_decay[..., None] * omega[..., None, :, :]).flatten(-2)  # (..., C, I)

    scale = gates.retention if spec.gradient_at == "decayed" else None
    kernel = feature.kernel(keys.flatten(-3, -2), keys.flatten(-3, -2))
    readers = _per_impulse(torch.arange(keys.shape[-3], device=keys.device), width, -1)
    kernel = unexpired(kernel, readers - 1, impulse_tokens(keys), spec.horizon)
    # Without momentum, the state before token t, decayed by it, is row t of the decays: nothing to shift.
    aligned = width == 1 and gates.momentum is None and (scale is not None or gates.retention is None)
    system = _system(kernel, writes, None, width) if aligned else _system(kernel, _before(writes), scale, width)
    inputs = feature.expand(keys.flatten(-3, -2))

    def shifted(row_scale: Tensor) -> Tensor:
        row_scale = row_scale if scale is None else row_scale * scale
        return _per_impulse(row_scale, width, -1)[..., None]

    weight_scale = weight[..., None] if aligned else shifted(_before(weight[..., None], first=1.0)[..., 0])
    weight_side = None if spec.kernel else weight_scale * inputs
    momentum_side = None if crossing is None else shifted(_before(crossing[..., None])[..., 0]) * inputs
    inverse, targets, weight_keys, momentum_keys = _UnitSolve.apply(
        system, values.flatten(-3, -2), weight_side, momentum_side
    )
    return ImpulseChunk(
        inputs,
        weight_keys,
        inverse if spec.kernel else None,
        weight_scale if spec.kernel else None,
        momentum_keys,
        targets,
        Coefficients(weight, crossing, momentum, writes, gathers),
        gamma,
        limits,
    )


def impulse_tokens(keys: Tensor) -> Tensor:
    """The token t − j of every impulse (I,), for keys (..., C, W, D)."""
    size, width = keys.shape[-3:-1]
    tokens = torch.arange(size, device=keys.device)[:, None] - torch.arange(width, device=keys.device)
    return tokens.flatten()


def impulse_errors(chunk: ImpulseChunk, weight: Tensor, momentum: Tensor | None, features: Tensor | None) -> Tensor:
    """E (R, I, V) at the state the chunk starts from: weight (R, V, F). features z (R, I, F): of an infinite layer."""
    weight_keys = chunk.weight_keys
    if chunk.inverse is not None and chunk.scale is not None and features is not None:
        return torch.bmm(chunk.inverse, chunk.scale * torch.bmm(features, weight.mT)) - chunk.targets
    assert weight_keys is not None
    errors = torch.baddbmm(chunk.targets, weight_keys, weight.mT, beta=-1)
    if chunk.momentum_keys is not None and momentum is not None:
        errors = torch.baddbmm(errors, chunk.momentum_keys, momentum.mT, alpha=-1)
    return errors


def _per_impulse(x: Tensor, width: int, dim: int) -> Tensor:
    """Each token's entry, once for every place of its window."""
    return x if width == 1 else x.repeat_interleave(width, dim)


def _before(rows: Tensor, first: float = 0.0) -> Tensor:
    """Row t − 1 in the place of row t (..., C, X)."""
    return torch.cat([torch.full_like(rows[..., :1, :], first), rows[..., :-1, :]], dim=-2)


def _system(kernel: Tensor, earlier: Tensor, scale: Tensor | None, width: int) -> Tensor:
    """L, the influence of earlier impulses: zero on and above the block diagonal of each token."""
    influence = earlier if scale is None else earlier * scale[..., None]
    return _per_impulse(influence, width, -2) * kernel


class _UnitSolve(torch.autograd.Function):
    """(I + L)⁻¹ of a strictly lower triangular L, and its products Y with right sides X, of which some may be absent.

    The gradient of L is −(I + L)⁻ᵀ dY Yᵀ = −dX Yᵀ: one product for each right side, where those of the inverse itself
    would be two more for each and two of its own. The sides are counted out: compilers lose a variable number of them.
    """

    @staticmethod
    def forward(
        ctx: Any, lower: Tensor, targets: Tensor, weight_keys: Tensor | None, momentum_keys: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
        # only what lies below the diagonal is read
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
        sides = (targets, weight_keys, momentum_keys)
        solved = [None if side is None else inverse @ side for side in sides]
        ctx.save_for_backward(inverse, *solved)
        ctx.set_materialize_grads(False)
        return inverse, *solved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inverse, *solved = ctx.saved_tensors
        of_right = [None if gradient is None else inverse.mT @ gradient for gradient in gradients[1:]]
        terms = [(left, side.mT) for left, side in zip(of_right, solved, strict=True) if left is not None]
        if gradients[0] is not None:
            terms.append((inverse.mT @ gradients[0], inverse.mT))
        return _minus_products(terms, inverse.shape), *of_right


def _minus_products(terms: Sequence[tuple[Tensor, Tensor]], shape: torch.Size) -> Tensor | None:
    """−Σ A B below the diagonal, in the shape given; summed in place, as these are the largest tensors there are."""
    total: Tensor | None = None
    for left, right in ((a.flatten(0, -3), b.flatten(0, -3)) for a, b in terms):
        total = torch.bmm(left, right).neg_() if total is None else total.baddbmm_(left, right, alpha=-1)
    return None if total is None else total.tril_(-1).view(shape)


def _window_limit(feature: Feature, keys: Tensor, omega: Tensor, momentum: Tensor | None) -> Tensor:
    """The write limiter of a single token's step (docs/method.md §9 with a chunk of one). Returns ℓ (..., C)."""
    if keys.shape[-2] == 1:
        row_sums = feature.of_products(keys.square().sum(-1)) * omega
    else:
        gram = feature.kernel(keys, keys).abs()  # (..., C, W, W)
        row_sums = (gram @ omega[..., None])[..., 0] * (omega > 0)
    bound = row_sums.amax(-1)
    if momentum is not None:
        bound = bound * (1 + momentum)
    return shrink_factor(bound, 1.0)
