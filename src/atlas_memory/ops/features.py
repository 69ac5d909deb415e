"""Feature maps φ of keys and queries, and their kernels φ(x)·φ(y).

Shapes: x (..., D), y (..., D) → expand(x) (..., F); kernel(x (..., M, D), y (..., N, D)) → (..., M, N).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from atlas_memory.ops.stability import safe_norm
from atlas_memory.spec import MemorySpec


class Feature(Protocol):
    def expand(self, x: Tensor) -> Tensor:
        """φ(x), or x itself where φ is infinite: then `inner` is the kernel."""
        ...

    def inner(self, z: Tensor, y: Tensor) -> Tensor:
        """Inner products of what `expand` gives."""
        ...

    def norm(self, z: Tensor) -> Tensor:
        """Norms of what `expand` gives (..., 1)."""
        ...

    def kernel(self, x: Tensor, y: Tensor) -> Tensor: ...

    def of_products(self, products: Tensor) -> Tensor:
        """φ(x)·φ(y) from x·y."""
        ...


class Identity:
    """φ(x) = x."""

    def expand(self, x: Tensor) -> Tensor:
        return x

    def inner(self, z: Tensor, y: Tensor) -> Tensor:
        return z @ y.mT

    def norm(self, z: Tensor) -> Tensor:
        return safe_norm(z, -1)

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y.mT

    def of_products(self, products: Tensor) -> Tensor:
        return products


class Polynomial:
    """All monomials up to a degree, symmetric ones merged: φ(x)·φ(y) = Σ_i c_i² (x·y)^i, exactly.

    `coefficients` (degree + 1,) are the c_i, one per degree, shared by keys and queries of the given width.
    """

    def __init__(self, coefficients: Tensor, width: int) -> None:
        self.coefficients = coefficients
        self.degree = coefficients.shape[-1] - 1
        counts = _monomial_counts(width, self.degree)
        per_monomial = torch.cat([c.expand(n) for c, n in zip(coefficients.unbind(-1), counts, strict=True)])
        self.factors, merged = _tables_on(width, self.degree, coefficients)
        self.scales = per_monomial * merged

    def expand(self, x: Tensor) -> Tensor:
        parts = [torch.ones_like(x[..., :1]), x.view_as(x)]  # a view: compilers refuse one tensor in two arguments
        for first, rest in self.factors:
            product: Tensor = _SelectedProduct.apply(x, parts[-1], first, rest)
            parts.append(product)
        return torch.cat(parts, dim=-1) * self.scales

    def inner(self, z: Tensor, y: Tensor) -> Tensor:
        return z @ y.mT

    def norm(self, z: Tensor) -> Tensor:
        return safe_norm(z, -1)

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return self.of_products(x @ y.mT)

    def of_products(self, products: Tensor) -> Tensor:
        weights = self.coefficients.square().unbind(-1)
        result = weights[-1] * products + weights[-2]
        for weight in reversed(weights[:-2]):
            result = result * products + weight
        return result


class Exponential:
    """φ*, of infinite width: φ*(x)·φ*(y) = exp(β(x·y − 1)), at most 1 for vectors of unit length (eq. 21–24)."""

    def __init__(self, sharpness: Tensor) -> None:
        """sharpness: β (1,)."""
        self.sharpness = sharpness

    def expand(self, x: Tensor) -> Tensor:
        return x

    def inner(self, z: Tensor, y: Tensor) -> Tensor:
        return self.kernel(z, y)

    def norm(self, z: Tensor) -> Tensor:
        # half of the exponent: a root of what has underflowed to 0 would have an infinite slope
        return torch.exp(0.5 * self.sharpness * (z.square().sum(-1, keepdim=True) - 1))

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp((x * self.sharpness) @ y.mT - self.sharpness)

    def of_products(self, products: Tensor) -> Tensor:
        return torch.exp(self.sharpness * (products - 1))


def feature_map(spec: MemorySpec, coefficients: Tensor | None, like: Tensor) -> Feature:
    """The feature map a spec names, in the dtype and on the device of `like`.

    `coefficients`: the c_i of a polynomial, default 1/√i! (those of the exponential's Taylor series); or the sharpness
    β of the exponential (1,), default √(key width), that of attention between vectors of unit variance.
    """
    if spec.feature == "identity":
        return Identity()
    if spec.feature == "exponential":
        return Exponential(
            like.new_full((1,), starting_sharpness(spec)) if coefficients is None else coefficients.to(like)
        )
    if coefficients is None:
        coefficients = torch.tensor(taylor_coefficients(spec.degree), dtype=torch.float64)
    return Polynomial(coefficients.to(like), spec.key_width)


def starting_sharpness(spec: MemorySpec) -> float:
    return math.sqrt(spec.key_width)


def taylor_coefficients(degree: int) -> list[float]:
    return [1 / math.sqrt(math.factorial(i)) for i in range(degree + 1)]


def _tables_on(width: int, degree: int, like: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Of all monomials up to a degree: places of their factors, of the degrees from 2 on, and their scales.

    Up to degree 2 they are made on the device, which has to wait for what is sent to it from the host.
    """
    device = like.device
    if degree <= 2:
        first, rest = torch.triu_indices(width, width, device=device)
        ones = like.new_ones(1 + width)
        if degree < 2:
            return [], ones
        return [(first, rest)], torch.cat([ones, (2 - (first == rest).to(like)).sqrt()])
    factors, scales = (_make_tables if torch.compiler.is_compiling() else _tables)(width, degree)
    sent = [(torch.tensor(first, device=device), torch.tensor(rest, device=device)) for first, rest in factors]
    return sent, torch.tensor(scales, dtype=like.dtype, device=device)


class _Tables(NamedTuple):
    factors: list[tuple[list[int], list[int]]]  # of the degrees from 2 on
    scales: list[float]


def _make_tables(width: int, degree: int) -> _Tables:
    return _Tables([_factor_indices(width, d) for d in range(2, degree + 1)], _merge_scales(width, degree))


# Kept for the next call, since they are made in Python; compilers do that once anyway, and do not see through this.
_tables = functools.cache(_make_tables)


def _monomial_counts(width: int, degree: int) -> list[int]:
    return [math.comb(width + i - 1, i) for i in range(degree + 1)]


def _factor_indices(width: int, degree: int) -> tuple[list[int], list[int]]:
    """Each monomial x_i x_j … is x_i times a monomial of one degree less: both places, in lexicographic order."""
    lower = {monomial: place for place, monomial in enumerate(_monomials(width, degree - 1))}
    monomials = _monomials(width, degree)
    return [m[0] for m in monomials], [lower[m[1:]] for m in monomials]


def _monomials(width: int, degree: int) -> list[tuple[int, ...]]:
    """Index tuples that do not fall, in lexicographic order: written out, for compilers that trace it."""
    tuples: list[tuple[int, ...]] = [()]
    for _ in range(degree):
        tuples = [(*head, last) for head in tuples for last in range(head[-1] if head else 0, width)]
    return tuples


def _merge_scales(width: int, degree: int) -> list[float]:
    """√(i! / Π m!) per monomial of degree i with multiplicities m: how often it occurs in (x·y)^i."""
    scales = []
    for i in range(degree + 1):
        for monomial in _monomials(width, i):
            ways = math.factorial(i)
            for index in set(monomial):
                ways //= math.factorial(monomial.count(index))
            scales.append(math.sqrt(ways))
    return scales


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
