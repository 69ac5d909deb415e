"""A dense fast layer's read, fold and retraction, each with its backward pass written out.

Autograd gives the same numbers with three times the passes over memory: these are the only places where the profile
asked for more. `torch.autograd.gradcheck` compares them with finite differences in the tests.

Shapes: R rows, Q queries, N tokens with gradients; weights W and momentum S are (R, out, in).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atlas_memory.ops.stability import LARGEST_GRADIENT, inner, may_look, safe_norm, shrink_factor


def read_dense(
    x: Tensor,
    weight: Tensor,
    momentum: Tensor | None,
    decay: Tensor,
    crossing: Tensor | None,
    mixing: Tensor,
    deltas: Tensor,
) -> Tensor:
    """a·xWᵀ − σ·xSᵀ − mixing δ (R, Q, out). x (R, Q, in), decay a and crossing σ (R, Q), mixing (R, Q, N)."""
    result: Tensor = _Read.apply(x, weight, momentum, decay, crossing, mixing, deltas)
    return result


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        momentum: Tensor | None,
        decay: Tensor,
        crossing: Tensor | None,
        mixing: Tensor,
        deltas: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, momentum, decay, crossing, mixing, deltas)
        result = torch.bmm(x, weight.mT).mul_(decay[..., None])
        if momentum is not None and crossing is not None:
            result.addcmul_(torch.bmm(x, momentum.mT), crossing[..., None], value=-1)
        return result.baddbmm_(mixing, deltas, alpha=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, momentum, decay, crossing, mixing, deltas = ctx.saved_tensors
        gradient = gradients[0]
        through = torch.bmm(gradient, weight)
        decay_gradient = (through * x).sum(-1)
        x_gradient = through.mul_(decay[..., None])
        weight_gradient = torch.bmm(*_scaled_outer(decay, gradient, x))
        momentum_gradient = crossing_gradient = None
        if momentum is not None:
            through = torch.bmm(gradient, momentum)
            crossing_gradient = (through * x).sum(-1).neg_()
            x_gradient.addcmul_(through, crossing[..., None], value=-1)
            momentum_gradient = torch.bmm(*_scaled_outer(-crossing, gradient, x))
        mixing_gradient = torch.bmm(gradient, deltas.mT).neg_()
        deltas_gradient = torch.bmm(mixing.mT, gradient).neg_()
        return (
            x_gradient,
            weight_gradient,
            momentum_gradient,
            decay_gradient,
            crossing_gradient,
            mixing_gradient,
            deltas_gradient,
        )


def fold_dense(
    base: Tensor,
    scale: Tensor,
    other: Tensor | None,
    other_scale: Tensor | None,
    coefficients: Tensor,
    deltas: Tensor,
    inputs: Tensor,
) -> Tensor:
    """scale·base + other_scale·other + Σ_i c_i δ_i ⊗ x_i (R, K, out, in): weights or momentum at K tokens of a chunk.

    scale, other_scale (R, K), coefficients c (R, K, N), deltas (R, N, out), inputs (R, N, in).
    """
    result: Tensor = _Fold.apply(base, scale, other, other_scale, coefficients, deltas, inputs)
    return result


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        base: Tensor,
        scale: Tensor,
        other: Tensor | None,
        other_scale: Tensor | None,
        coefficients: Tensor,
        deltas: Tensor,
        inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(base, scale, other, other_scale, coefficients, deltas, inputs)
        result = base[:, None] * scale[..., None, None]
        if other is not None and other_scale is not None:
            result.addcmul_(other[:, None], other_scale[..., None, None])
        left, right = _scaled_outer(coefficients, deltas[:, None], inputs[:, None])
        left, right = (x.expand(*scale.shape, -1, -1).flatten(0, 1) for x in (left, right))
        result.flatten(0, 1).baddbmm_(left, right)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        base, scale, other, other_scale, coefficients, deltas, inputs = ctx.saved_tensors
        gradient = gradients[0]
        other_gradient = other_scale_gradient = None
        if other is not None:
            other_gradient = _over_tokens(other_scale, gradient)
            other_scale_gradient = inner(gradient, other[:, None])[..., 0, 0]
        at_inputs = deltas[:, None] @ gradient  # (R, K, N, in)
        at_deltas = inputs[:, None] @ gradient.mT
        return (
            _over_tokens(scale, gradient),
            inner(gradient, base[:, None])[..., 0, 0],
            other_gradient,
            other_scale_gradient,
            (at_inputs * inputs[:, None]).sum(-1),
            _over_tokens(coefficients, at_deltas),
            _over_tokens(coefficients, at_inputs),
        )


def move_dense(base: Tensor, scale: Tensor, steps: Tensor, moves: Tensor) -> Tensor:
    """scale·base − Σ_u m_u step_u (R, Q, out, in): weights at Q tokens. scale (R, Q), steps (R, K, out, in), moves m
    (R, Q, K)."""
    result: Tensor = _Move.apply(base, scale, steps, moves)
    return result


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, scale: Tensor, steps: Tensor, moves: Tensor) -> Tensor:
        ctx.save_for_backward(base, scale, steps, moves)
        return (base[:, None] * scale[..., None, None]).sub_(_combined(moves, steps))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        base, scale, steps, moves = ctx.saved_tensors
        gradient = gradients[0]
        return (
            _over_tokens(scale, gradient),
            inner(gradient, base[:, None])[..., 0, 0],
            _combined(-moves.mT, gradient),
            torch.bmm(gradient.flatten(2), steps.flatten(2).mT).neg_(),
        )


def _combined(coefficients: Tensor, matrices: Tensor) -> Tensor:
    """Σ_u c_u M_u (R, Q, out, in) of coefficients (R, Q, K) and matrices (R, K, out, in)."""
    if matrices.shape[1] == 1:  # the product of a column and a row is slow
        return coefficients[..., None] * matrices
    return torch.bmm(coefficients, matrices.flatten(2)).unflatten(2, matrices.shape[2:])


def _over_tokens(scales: Tensor, x: Tensor) -> Tensor:
    """Σ_k s_k x_k (R, ...) of scales (R, K, ...) and x (R, K, ..., out, in)."""
    scaled = scales.reshape(*scales.shape, *[1] * (x.ndim - scales.ndim)) * x
    return scaled.squeeze(1) if x.shape[1] == 1 else scaled.sum(1)


def retract(x: Tensor, root_mean_square: float) -> tuple[Tensor, Tensor]:
    """x (R, out, in) drawn back into the ball of that root-mean-square entry, and the factors (R, 1, 1).

    The gradient that comes back through it is drawn into the ball of LARGEST_GRADIENT. Norms that overflow to infinity
    give a factor of 0: an emptied weight, and finite all the same.
    """
    radius = root_mean_square * (x.shape[-2] * x.shape[-1]) ** 0.5
    result, factor = _Retract.apply(x, radius)
    return result, factor


class _Retract(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        factor = shrink_factor(_norm(x), radius)
        nothing = may_look(factor) and bool((factor == 1).all())  # as a rule
        result = x.view_as(x) if nothing else x * factor
        ctx.radius = radius
        ctx.save_for_backward(result, factor)
        ctx.mark_non_differentiable(factor)
        return result, factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        result, factor = ctx.saved_tensors
        gradient = gradients[0]
        norm = _norm(gradient)
        if may_look(norm) and bool(((norm <= LARGEST_GRADIENT) & (factor == 1)).all()):
            return gradient, None
        gradient = gradient * shrink_factor(safe_norm(gradient, (-2, -1)), LARGEST_GRADIENT)
        # on the sphere only the tangential part passes
        radial = inner(gradient, result) / ctx.radius**2
        return torch.where(factor < 1, (gradient - result * radial) * factor, gradient), None


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def _scaled_outer(scales: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors of Σ_i s_i left_i ⊗ right_i, the scales (..., N) on the narrower one."""
    if left.shape[-1] <= right.shape[-1]:
        return (scales[..., None] * left).mT, right
    return left.mT, scales[..., None] * right
