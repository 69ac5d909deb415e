"""Newton–Schulz: the orthogonal factor of many matrices at once, by matrix products only.

Shapes: (..., M, N), any leading dimensions. The answer tends to U Vᵀ of the singular value decomposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atlas_memory.checks import check_whole
from atlas_memory.ops.stability import harmless, inner, may_look

# X ← a X + b (XXᵀ) X + c (XXᵀ)² X. The first steps widen the range of singular values that is caught quickly
# (minimax odd polynomials, each fitted to the range the one before leaves behind); the last one, repeated as long as
# asked for, has 1 as an attracting fixed point, so that more steps mean a smaller error. Jordan's quintic has none.
_WIDENING = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
)
_CONVERGING = (15 / 8, -5 / 4, 3 / 8)

# A margin on the norm: the widening polynomials are fitted to [0, 1] and grow quickly above it.
_MARGIN = 1.01

# Bytes of the matrices that a processor works on at once: few enough for its cache, where one matrix passes through all
# steps before the next begins. Accelerators take all at once.
_CACHED = 1 << 20

# Steps that may run on the Gram matrix alone before it is formed anew: its rounding errors are relative to the largest
# squared singular value, and a fresh one, after the small ones have grown, forgets them.
_GRAM_STEPS = 3

Coefficients = tuple[float, float, float]


def newton_schulz(
    matrix: Tensor, steps: int = 5, floor: float = 1e-6, polynomials: Sequence[Coefficients] | None = None
) -> Tensor:
    """Approximate polar factor of `matrix` (..., M, N) after `steps` iterations, or after those of `polynomials`.

    `floor` is added to the norm the matrix is divided by: an empty matrix gives an empty answer, not a random
    orthogonal one. Differentiable; the backward pass recomputes the iterates instead of storing them.
    """
    if matrix.ndim < 2:
        raise ValueError(f"matrix must have at least two dimensions, got shape {tuple(matrix.shape)}.")
    check_whole("steps", steps)
    if not floor > 0:
        raise ValueError(f"floor={floor!r} must be positive.")
    if not matrix.is_floating_point():
        raise ValueError(f"matrix must be floating point, got {matrix.dtype}.")
    if matrix.numel() == 0:
        return matrix.clone()
    if matrix.shape[-2] > matrix.shape[-1]:  # the iteration runs on the rows: let them be the short side
        return newton_schulz(matrix.mT, steps, floor, polynomials).mT
    return _iterate(_normalise(matrix, floor), schedule(steps) if polynomials is None else polynomials)


def schedule(steps: int) -> list[Coefficients]:
    """The polynomial of every step: widening first, then converging."""
    return [_WIDENING[i] if i < len(_WIDENING) else _CONVERGING for i in range(steps)]


def _normalise(matrix: Tensor, floor: float) -> Tensor:
    norm, bound = torch.linalg.vector_norm(matrix.detach(), dim=(-2, -1), keepdim=True), harmless(matrix.dtype)
    # What vanishes among the squares is nothing beside the floor, if that is of any size.
    plain = (norm < bound) & ((norm > 1 / bound) | (floor > 1 / bound))
    if may_look(plain) and bool(plain.all()):  # as a rule
        result: Tensor = _Normalise.apply(matrix, norm, floor)
        return result
    # The largest entry is taken out, so that squares neither overflow nor vanish; mathematically it cancels.
    largest = matrix.detach().abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    scale = torch.where(plain, 1, largest)
    unit = matrix / scale
    norm = torch.linalg.vector_norm(unit, dim=(-2, -1), keepdim=True)
    return unit * (norm * _MARGIN + floor / scale).reciprocal()


class _Normalise(torch.autograd.Function):
    """M f with f = 1 / (margin ‖M‖ + floor), given the norm. Autograd makes four more matrices on the way back."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, norm: Tensor, floor: float) -> Tensor:
        factor = (norm * _MARGIN + floor).reciprocal()
        result = matrix * factor
        ctx.save_for_backward(result, norm, factor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        result, norm, factor = ctx.saved_tensors
        gradient = gradients[0]
        along = inner(gradient, result) * (-_MARGIN / norm.clamp_min(torch.finfo(norm.dtype).tiny))
        return (gradient * factor).addcmul_(result, along), None, None


def _iterate(matrix: Tensor, polynomials: Sequence[Coefficients]) -> Tensor:
    rows, columns = matrix.shape[-2:]
    flat = matrix.reshape(-1, rows, columns)
    result: Tensor = _Iteration.apply(flat, tuple(polynomials))
    return result.reshape(matrix.shape)


def _blocks(polynomials: Sequence[Coefficients], rows: int, columns: int) -> list[Sequence[Coefficients]]:
    """How many steps share one Gram matrix. One: the plain iteration, cheaper for nearly square matrices."""
    # products of size rows³ a step: plain 2·columns/rows + 1; Gram side 4, and 2·columns/rows a block
    ratio = columns / rows
    length = _GRAM_STEPS if 2 * ratio / _GRAM_STEPS + 4 < 2 * ratio + 1 else 1
    return [polynomials[i : i + length] for i in range(0, len(polynomials), length)]


def _polynomial(gram: Tensor, coefficients: Coefficients) -> Tensor:
    """a I + b A + c A² for symmetric A."""
    a, b, c = coefficients
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def _polynomial_gradient(gradient: Tensor, gram: Tensor, coefficients: Coefficients) -> Tensor:
    _, b, c = coefficients
    return torch.baddbmm(torch.baddbmm(gradient, gram, gradient, beta=b, alpha=c), gradient, gram, alpha=c)


class _Iteration(torch.autograd.Function):
    """Steps in blocks X ← Q(XXᵀ) X, Q the product of the block's polynomials, kept on the Gram side."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, polynomials: tuple[Coefficients, ...]) -> Tensor:
        ctx.save_for_backward(matrix)
        ctx.blocks = _blocks(polynomials, *matrix.shape[-2:])
        return _joined([_iterated(part, ctx.blocks) for part in _parts(matrix)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = zip(_parts(ctx.saved_tensors[0]), _parts(gradients[0]), strict=True)
        return _joined([_iterated_backward(*part, ctx.blocks) for part in parts]), None


def _parts(matrices: Tensor) -> tuple[Tensor, ...]:
    """(R, M, N) → what is worked on at once."""
    if not may_look(matrices):
        return (matrices,)
    return matrices.split(max(1, _CACHED // (matrices[0].numel() * matrices.element_size())))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _iterated(matrix: Tensor, blocks: Sequence[Sequence[Coefficients]]) -> Tensor:
    for block in blocks:
        matrix = torch.bmm(_block_forward(torch.bmm(matrix, matrix.mT), block)[-1][2], matrix)
    return matrix


def _iterated_backward(matrix: Tensor, gradient: Tensor, blocks: Sequence[Sequence[Coefficients]]) -> Tensor:
    inputs, traces = [], []
    for block in blocks:
        trace = _block_forward(torch.bmm(matrix, matrix.mT), block)
        inputs.append(matrix)
        traces.append((block, trace))
        matrix = torch.bmm(trace[-1][2], matrix)
    for matrix, (block, trace) in zip(reversed(inputs), reversed(traces), strict=True):
        product_gradient = torch.bmm(gradient, matrix.mT)
        gram_gradient = _block_backward(product_gradient, block, trace)
        gradient = torch.bmm(trace[-1][2], gradient)  # Q is symmetric
        gradient = torch.baddbmm(gradient, gram_gradient + gram_gradient.mT, matrix)
    return gradient


def _block_forward(gram: Tensor, block: Sequence[Coefficients]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per step: the Gram matrix A it starts from, its polynomial p(A), and the product Q of all polynomials so far.

    All are polynomials of one symmetric matrix: they commute, and the next Gram matrix is p(A)² A.
    """
    trace: list[tuple[Tensor, Tensor, Tensor]] = []
    for i, coefficients in enumerate(block):
        polynomial = _polynomial(gram, coefficients)
        product = polynomial if i == 0 else torch.bmm(polynomial, trace[-1][2])
        trace.append((gram, polynomial, product))
        if i + 1 < len(block):
            gram = torch.bmm(polynomial, torch.bmm(polynomial, gram))
    return trace


def _block_backward(
    product_gradient: Tensor, block: Sequence[Coefficients], trace: list[tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """Gradient of the block's first Gram matrix, given that of its product Q."""
    gram_gradient: Tensor | None = None
    for i in range(len(block) - 1, -1, -1):
        gram, polynomial, _ = trace[i]
        polynomial_gradient = product_gradient if i == 0 else torch.bmm(product_gradient, trace[i - 1][2])
        carried: Tensor | None = None
        if gram_gradient is not None:  # of p(A) (p(A) A)
            inner = torch.bmm(polynomial, gram)
            inner_gradient = torch.bmm(polynomial, gram_gradient)
            polynomial_gradient = torch.baddbmm(polynomial_gradient, gram_gradient, inner.mT)
            polynomial_gradient = torch.baddbmm(polynomial_gradient, inner_gradient, gram)
            carried = torch.bmm(polynomial, inner_gradient)
        gram_gradient = _polynomial_gradient(polynomial_gradient, gram, block[i])
        if carried is not None:
            gram_gradient = gram_gradient + carried
        if i > 0:
            product_gradient = torch.bmm(polynomial, product_gradient)
    assert gram_gradient is not None
    return gram_gradient
