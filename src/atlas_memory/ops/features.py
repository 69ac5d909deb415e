"""Feature maps φ of keys and queries, and their kernels φ(x)·φ(y).

Shapes: x (..., D), y (..., D) → expand(x) (..., F); kernel(x (..., M, D), y (..., N, D)) → (..., M, N).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from atlas_memory.spec import MemorySpec


class Feature(Protocol):
    def expand(self, x: Tensor) -> Tensor: ...

    def kernel(self, x: Tensor, y: Tensor) -> Tensor: ...


class Identity:
    """φ(x) = x."""

    def expand(self, x: Tensor) -> Tensor:
        return x

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y.mT


class Polynomial:
    """All monomials up to a degree, symmetric ones merged: φ(x)·φ(y) = Σ_i c_i² (x·y)^i, exactly.

    `coefficients` (degree + 1,) are the c_i, one per degree, shared by keys and queries.
    """

    def __init__(self, coefficients: Tensor) -> None:
        self.coefficients = coefficients
        self.degree = coefficients.shape[-1] - 1

    def expand(self, x: Tensor) -> Tensor:
        parts = [torch.ones_like(x[..., :1])]
        for degree in range(1, self.degree + 1):
            parts.append(_next_monomials(x, parts[-1], degree))
        scales = _merge_scales(x.shape[-1], self.degree, x.dtype, x.device)
        widths = torch.tensor([part.shape[-1] for part in parts], device=x.device)
        per_monomial = self.coefficients.to(x.dtype).repeat_interleave(widths, output_size=scales.shape[0])
        return torch.cat(parts, dim=-1) * (per_monomial * scales)

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        products = x @ y.mT
        weights = self.coefficients.to(x.dtype).square().unbind(-1)
        result = weights[-1] * products + weights[-2]
        for weight in reversed(weights[:-2]):
            result = result * products + weight
        return result


def feature_map(spec: MemorySpec, coefficients: Tensor | None) -> Feature:
    """The feature map a spec names. `coefficients`: the c_i of a polynomial, default 1/√i! (the Taylor ones)."""
    if spec.feature == "identity":
        return Identity()
    if coefficients is None:
        coefficients = torch.tensor(taylor_coefficients(spec.degree), dtype=torch.float64)
    return Polynomial(coefficients)


def taylor_coefficients(degree: int) -> list[float]:
    return [1 / math.sqrt(math.factorial(i)) for i in range(degree + 1)]


def _next_monomials(x: Tensor, lower: Tensor, degree: int) -> Tensor:
    """Monomials of `degree` from those of one degree less, in lexicographic order of their index tuples."""
    if degree == 1:
        return x
    first, rest = _factor_indices(x.shape[-1], degree)
    result: Tensor = _SelectedProduct.apply(x, lower, first.to(x.device), rest.to(x.device))  # type: ignore[no-untyped-call]
    return result


@lru_cache(maxsize=64)
def _factor_indices(width: int, degree: int) -> tuple[Tensor, Tensor]:
    """Each monomial x_i x_j… is x_i times a monomial of one degree less: both indices."""
    lower = {m: n for n, m in enumerate(itertools.combinations_with_replacement(range(width), degree - 1))}
    monomials = list(itertools.combinations_with_replacement(range(width), degree))
    return torch.tensor([m[0] for m in monomials]), torch.tensor([lower[m[1:]] for m in monomials])


@lru_cache(maxsize=64)
def _merge_scales(width: int, degree: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """√(i! / Π m!) per monomial of degree i with multiplicities m: how often it occurs in (x·y)^i."""
    scales = []
    for i in range(degree + 1):
        for monomial in itertools.combinations_with_replacement(range(width), i):
            repeats = math.prod(math.factorial(n) for n in Counter(monomial).values())
            scales.append(math.sqrt(math.factorial(i) / repeats))
    with torch.inference_mode(False):
        return torch.tensor(scales, dtype=dtype, device=device)


class _SelectedProduct(torch.autograd.Function):
    """x[..., first] * y[..., rest], with gradients as products with 0/1 matrices: index sums are slow and unordered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, first: Tensor, rest: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, first, rest)
        return x.index_select(-1, first) * y.index_select(-1, rest)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, y, first, rest = ctx.saved_tensors
        gradient = gradients[0]
        x_gradient = (gradient * y.index_select(-1, rest)) @ _one_hot(first, x)
        y_gradient = (gradient * x.index_select(-1, first)) @ _one_hot(rest, y)
        return x_gradient, y_gradient, None, None


def _one_hot(indices: Tensor, like: Tensor) -> Tensor:
    width = like.shape[-1]
    return (indices[:, None] == torch.arange(width, device=indices.device)).to(like.dtype)
