"""Features and kernels are two ways to the same number."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from atlas_memory import MemorySpec
from atlas_memory.ops.features import Feature, feature_map, taylor_coefficients

DEGREES = [1, 2, 3, 4]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _feature(degree: int, width: int, coefficients: Tensor | None = None) -> Feature:
    spec = MemorySpec(feature="polynomial", degree=degree, key_width=width)
    return feature_map(spec, coefficients, torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("degree", DEGREES)
def test_kernel_equals_inner_product_of_features(degree: int, width: int) -> None:
    feature = _feature(degree, width, torch.rand(degree + 1, dtype=torch.float64) + 0.2)
    x, y = _normal(2, 3, width), _normal(2, 4, width)
    torch.testing.assert_close(feature.expand(x) @ feature.expand(y).mT, feature.kernel(x, y), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("degree", DEGREES)
def test_kernel_is_the_polynomial_of_the_inner_product(degree: int) -> None:
    coefficients = torch.rand(degree + 1, dtype=torch.float64)
    x, y = _normal(3, 4), _normal(5, 4)
    expected = sum(c**2 * (x @ y.mT) ** i for i, c in enumerate(coefficients))
    torch.testing.assert_close(_feature(degree, 4, coefficients).kernel(x, y), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("degree", DEGREES)
def test_features_are_the_monomials_each_once(degree: int) -> None:
    """Up to order and sign, with symmetric ones merged."""
    width, x = 3, torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    expected = []
    for i in range(degree + 1):
        for monomial in itertools.combinations_with_replacement(range(width), i):
            repeats = math.prod(math.factorial(monomial.count(j)) for j in set(monomial))
            expected.append(math.prod(float(x[j]) for j in monomial) / math.sqrt(repeats))
    features = _feature(degree, width).expand(x)
    spec = MemorySpec(feature="polynomial", degree=degree, key_width=width)
    assert features.shape == (spec.feature_width,)
    expected_tensor = torch.tensor(sorted(expected), dtype=torch.float64)
    torch.testing.assert_close(features.sort().values, expected_tensor, rtol=1e-12, atol=0)


@pytest.mark.parametrize("degree", DEGREES)
def test_default_is_the_exponential_series_in_full_precision(degree: int) -> None:
    x, y = _normal(3, 4), _normal(5, 4)
    expected = sum((x @ y.mT) ** i / math.factorial(i) for i in range(degree + 1))
    torch.testing.assert_close(_feature(degree, 4).kernel(x, y), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(taylor_coefficients(degree), [math.factorial(i) ** -0.5 for i in range(degree + 1)])


@pytest.mark.parametrize("degree", DEGREES)
def test_gradients(degree: int) -> None:
    x, coefficients = _normal(2, 3).requires_grad_(), torch.rand(degree + 1, dtype=torch.float64, requires_grad=True)
    y = _normal(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, c: _feature(degree, 3, c).expand(x), (x, coefficients))
    assert torch.autograd.gradcheck(lambda x, y, c: _feature(degree, 3, c).kernel(x, y), (x, y, coefficients))


def test_identity() -> None:
    feature = feature_map(MemorySpec(key_width=3), None, torch.zeros(()))
    x, y = _normal(2, 3), _normal(4, 3)
    assert torch.equal(feature.expand(x), x)
    torch.testing.assert_close(feature.kernel(x, y), x @ y.mT)
