"""A dense fast layer's read, fold and retraction, each with its backward pass written out.

Autograd gives the same numbers with three times the passes over memory: these are the only places where the profile
asked for more. `torch.autograd.gradcheck` compares them with finite differences in the tests.

Shapes: R rows, Q queries, N tokens with gradients; weights W and momentum S are (R, out, in).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atlas_memory.ops.stability import LARGEST_GRADIENT, may_look, safe_norm, shrink_factor


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
    """scale·base + other_scale·other + Σ_i c_i δ_i ⊗ x_i (R, out, in): weights or momentum at the end of a chunk.

    scale, other_scale (R,), coefficients c (R, N), deltas (R, N, out), inputs (R, N, in).
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
        result = base * scale[:, None, None]
        if other is not None and other_scale is not None:
            result.addcmul_(other, other_scale[:, None, None])
        return result.baddbmm_(*_scaled_outer(coefficients, deltas, inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        base, scale, other, other_scale, coefficients, deltas, inputs = ctx.saved_tensors
        gradient = gradients[0]
        other_gradient = other_scale_gradient = None
        if other is not None:
            other_gradient = gradient * other_scale[:, None, None]
            other_scale_gradient = _inner(gradient, other)
        inputs_gradient = torch.bmm(deltas, gradient)
        coefficients_gradient = (inputs_gradient * inputs).sum(-1)
        inputs_gradient.mul_(coefficients[..., None])
        deltas_gradient = torch.bmm(inputs, gradient.mT).mul_(coefficients[..., None])
        return (
            gradient * scale[:, None, None],
            _inner(gradient, base),
            other_gradient,
            other_scale_gradient,
            coefficients_gradient,
            deltas_gradient,
            inputs_gradient,
        )


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
        radial = _inner(gradient, result)[:, None, None] / ctx.radius**2
        return torch.where(factor < 1, (gradient - result * radial) * factor, gradient), None


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """Inner product of the matrices of each row (R,)."""
    return torch.linalg.vecdot(x.flatten(1), y.flatten(1))


def _scaled_outer(scales: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors of Σ_i s_i left_i ⊗ right_i, the scales (R, N) on the narrower one."""
    if left.shape[-1] <= right.shape[-1]:
        return (scales[..., None] * left).mT, right
    return left.mT, scales[..., None] * right
