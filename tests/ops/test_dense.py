"""The hand-written backward passes of a dense fast layer, against finite differences and against plain formulas."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from atlas_memory.ops.dense import fold_dense, move_dense, read_dense, retract
from atlas_memory.ops.stability import LARGEST_GRADIENT

ROWS, QUERIES, TOKENS, POINTS = 2, 3, 4, 2


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _read_arguments(outputs: int, inputs: int, momentum: bool) -> tuple[Tensor | None, ...]:
    return (
        _normal(ROWS, QUERIES, inputs),
        _normal(ROWS, outputs, inputs),
        _normal(ROWS, outputs, inputs) if momentum else None,
        _normal(ROWS, QUERIES),
        _normal(ROWS, QUERIES) if momentum else None,
        _normal(ROWS, QUERIES, TOKENS),
        _normal(ROWS, TOKENS, outputs),
    )


def _fold_arguments(outputs: int, inputs: int, momentum: bool, points: int = POINTS) -> tuple[Tensor | None, ...]:
    return (
        _normal(ROWS, outputs, inputs),
        _normal(ROWS, points),
        _normal(ROWS, outputs, inputs) if momentum else None,
        _normal(ROWS, points) if momentum else None,
        _normal(ROWS, points, TOKENS),
        _normal(ROWS, TOKENS, outputs),
        _normal(ROWS, TOKENS, inputs),
    )


def _plain_read(x, weight, momentum, decay, crossing, mixing, deltas) -> Tensor:
    result = decay[..., None] * (x @ weight.mT) - mixing @ deltas
    return result if momentum is None else result - crossing[..., None] * (x @ momentum.mT)


def _plain_fold(base, scale, other, other_scale, coefficients, deltas, inputs) -> Tensor:
    result = torch.einsum("rk,roi->rkoi", scale, base)
    result = result + torch.einsum("rkn,rno,rni->rkoi", coefficients, deltas, inputs)
    return result if other is None else result + torch.einsum("rk,roi->rkoi", other_scale, other)


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(2, 5), (5, 2)])
@pytest.mark.parametrize(
    ("function", "plain", "arguments"),
    [
        (read_dense, _plain_read, _read_arguments),
        (fold_dense, _plain_fold, _fold_arguments),
        (fold_dense, _plain_fold, functools.partial(_fold_arguments, points=1)),
    ],
    ids=["read", "fold", "fold at one token"],
)
def test_value_and_gradient(function, plain, arguments, outputs: int, inputs: int, momentum: bool) -> None:
    tensors = arguments(outputs, inputs, momentum)
    torch.testing.assert_close(function(*tensors), plain(*tensors))
    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_weights_that_steps_have_moved(tokens: int, steps: int) -> None:
    tensors = (_normal(ROWS, 2, 5), _normal(ROWS, tokens), _normal(ROWS, steps, 2, 5), _normal(ROWS, tokens, steps))
    base, scale, taken, moves = tensors
    expected = torch.einsum("rq,roi->rqoi", scale, base) - torch.einsum("rqk,rkoi->rqoi", moves, taken)
    torch.testing.assert_close(move_dense(*tensors), expected)
    assert torch.autograd.gradcheck(move_dense, tensors)


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_retraction_and_its_gradient(scale: float) -> None:
    """Inside the ball nothing happens; outside, x is drawn onto the sphere, and gradients see that."""
    x = _normal(ROWS, 3, 4)
    x = (x / x.square().mean((-2, -1), keepdim=True).sqrt() * scale).detach().requires_grad_()
    result, factor = retract(x, 1.0)
    torch.testing.assert_close(result, x * min(1.0, 1.0 / scale))
    torch.testing.assert_close(factor.flatten(), torch.full((ROWS,), min(1.0, 1.0 / scale), dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: retract(x, 1.0)[0], (x,))


def test_retracting_twice_is_retracting_once() -> None:
    once, _ = retract(torch.randn(ROWS, 3, 4) * 7, 1.0)
    twice, factor = retract(once, 1.0)
    assert torch.equal(twice, once)
    assert torch.equal(factor, torch.ones(ROWS, 1, 1))


@pytest.mark.parametrize("gradient_scale", [1.0, 1e30, 1e37])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18, 1e30])
def test_retraction_stays_finite(scale: float, gradient_scale: float) -> None:
    """Also where squares overflow, of the weights and of the gradient that comes back."""
    x = (torch.randn(ROWS, 3, 4) * scale).requires_grad_()
    result, _ = retract(x, 100.0)
    (gradient,) = torch.autograd.grad(result, x, torch.randn(ROWS, 3, 4) * gradient_scale)
    assert torch.isfinite(result).all()
    assert result.square().mean((-2, -1)).sqrt().max() <= 100.0 * (1 + 1e-5)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("gradient_scale", [1e13, 1e30, 1e37])
def test_large_gradients_are_drawn_into_the_ball(gradient_scale: float) -> None:
    x, coming = torch.randn(ROWS, 3, 4, requires_grad=True), torch.randn(ROWS, 3, 4)
    (gradient,) = torch.autograd.grad(retract(x, 100.0)[0], x, coming * gradient_scale)
    torch.testing.assert_close(gradient, coming / coming.norm(dim=(-2, -1), keepdim=True) * LARGEST_GRADIENT)
