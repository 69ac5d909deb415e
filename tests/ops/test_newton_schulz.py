"""Newton–Schulz against the singular value decomposition, and its backward pass against finite differences."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from atlas_memory.ops import newton_schulz

SHAPES = [(4, 4), (3, 7), (7, 3), (1, 5), (5, 1), (1, 1), (2, 40), (40, 2), (5, 4, 6), (2, 3, 6, 4), (2, 2, 3, 30)]
MANY = 40


def _matrix(*shape: int, smallest: float = 1e-3) -> Tensor:
    """Random singular vectors; singular values from `smallest` to 1, spaced evenly on a logarithmic scale."""
    left, _, right = torch.linalg.svd(torch.randn(*shape, dtype=torch.float64), full_matrices=False)
    rank = min(shape[-2:])
    values = torch.logspace(0, torch.log10(torch.tensor(smallest)).item(), rank, dtype=torch.float64)
    return left * values @ right


def _polar(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_steps_give_the_polar_factor(shape: tuple[int, ...], scale: float) -> None:
    matrix = _matrix(*shape)
    torch.testing.assert_close(newton_schulz(matrix * scale, MANY, floor=1e-12), _polar(matrix), rtol=0, atol=1e-8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_steps_give_the_polar_factor_in_single_precision(shape: tuple[int, ...]) -> None:
    matrix = _matrix(*shape)
    answer = newton_schulz(matrix.float(), MANY)
    assert answer.dtype == torch.float32
    torch.testing.assert_close(answer.double(), _polar(matrix), rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", [(6, 6), (3, 30)], ids=str)
def test_error_falls_with_more_steps(shape: tuple[int, int]) -> None:
    matrix = _matrix(*shape)
    errors = [float((newton_schulz(matrix, steps, floor=1e-12) - _polar(matrix)).norm()) for steps in (2, 4, 6, 8, 10)]
    errors = [max(error, 1e-12) for error in errors]  # below lies rounding
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] * 1e-3


def test_default_steps_bring_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(newton_schulz(_matrix(8, 8, smallest=1e-2)))
    assert values.min() > 0.6
    assert values.max() < 1.4


@pytest.mark.parametrize("shape", [(3, 3), (2, 30), (0, 4), (4, 0), (0, 3, 3)], ids=str)
def test_zero_gives_zero(shape: tuple[int, ...]) -> None:
    matrix = torch.zeros(*shape, requires_grad=True)
    answer = newton_schulz(matrix)
    assert torch.equal(answer, torch.zeros(*shape))
    (gradient,) = torch.autograd.grad(answer.sum(), matrix)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("shape", [(3, 3), (2, 30)], ids=str)
def test_an_empty_matrix_has_a_gradient(shape: tuple[int, int]) -> None:
    """The first gradient a memory gathers is added to an empty momentum: what let it in has to learn from that."""
    batch = torch.stack([torch.zeros(*shape, dtype=torch.float64), _matrix(*shape)]).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: newton_schulz(x, floor=1.0), (batch,))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_what_the_floor_is_nothing_to(scale: float) -> None:
    """However small or large, single precision gives what double precision does."""
    matrix = _matrix(3, 5)
    answer = newton_schulz(matrix.float() * scale, floor=1e-38)
    torch.testing.assert_close(answer.double(), newton_schulz(matrix, floor=1e-30), rtol=0, atol=1e-4)


def test_floor_fades_small_matrices_out() -> None:
    """Below the floor the answer is small, instead of a random orthogonal matrix."""
    matrix = _matrix(3, 3, smallest=0.5)
    norms = [float(newton_schulz(matrix * scale, steps=5, floor=1e-6).norm()) for scale in (1e-12, 1e-10, 1.0)]
    assert norms[0] < 1e-2 < norms[1] < 1 < norms[2]


def test_rows_of_a_batch_do_not_touch() -> None:
    batch = torch.stack([_matrix(3, 5), torch.zeros(3, 5, dtype=torch.float64), _matrix(3, 5) * 1e6])
    alone = torch.stack([newton_schulz(matrix) for matrix in batch])
    torch.testing.assert_close(newton_schulz(batch), alone, rtol=1e-12, atol=1e-14)


# Nearly square matrices take the plain iteration, wide and tall ones the Gram side.
@pytest.mark.parametrize("steps", [1, 4, 7])
@pytest.mark.parametrize("shape", [(3, 3), (3, 4), (4, 3), (1, 4), (2, 14), (14, 2), (2, 2, 12)], ids=str)
def test_gradient(shape: tuple[int, ...], steps: int) -> None:
    matrix = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: newton_schulz(x, steps), (matrix,))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("shape", [(3, 3), (2, 30)], ids=str)
def test_extreme_magnitudes_stay_finite(shape: tuple[int, int], scale: float) -> None:
    matrix = (_matrix(*shape).float() * scale).requires_grad_()
    answer = newton_schulz(matrix)
    (gradient,) = torch.autograd.grad(answer.sum(), matrix)
    assert torch.isfinite(answer).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"matrix": torch.ones(3)}, "matrix"),
        ({"matrix": torch.ones(3, 3, dtype=torch.long)}, "matrix"),
        ({"matrix": torch.ones(3, 3), "steps": 0}, "steps=0"),
        ({"matrix": torch.ones(3, 3), "steps": 2.0}, "steps=2.0"),
        ({"matrix": torch.ones(3, 3), "steps": True}, "steps=True"),
        ({"matrix": torch.ones(3, 3), "floor": 0.0}, "floor=0.0"),
        ({"matrix": torch.ones(3, 3), "floor": float("nan")}, "floor=nan"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        newton_schulz(**arguments)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_what_is_worked_on_at_once_makes_no_difference(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(5, 3, 6, dtype=torch.float64, requires_grad=True)
    expected = newton_schulz(matrix, 5, floor=0.1)
    (gradient,) = torch.autograd.grad(expected.sin().sum(), matrix)
    module = importlib.import_module("atlas_memory.ops.newton_schulz")
    monkeypatch.setattr(module, "_CACHED", at_once * 3 * 6 * 8)
    assert len(module._parts(matrix)) == -(-5 // at_once)
    result = newton_schulz(matrix, 5, floor=0.1)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.autograd.grad(result.sin().sum(), matrix)[0], gradient)
