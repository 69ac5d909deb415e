"""The multiplications and additions the chunk form needs, product by product: docs/method.md, "chunk-parallel form".

Counted for an MLP memory with gd or momentum. Elementwise work and recomputation are not counted, nor is what the
operator does once per call. A product counts at its full size, as in the matrix product it is compared with; those of
which only a triangle is used are marked, so that a stricter count is possible.
"""

from __future__ import annotations

from typing import NamedTuple

from atlas_memory import MemorySpec


class Product(NamedTuple):
    """(rows × inner) · (inner × columns). triangular: half of the result or of a factor is known to be zero, or the
    mirror image of the other half."""

    what: str
    rows: int
    inner: int
    columns: int
    triangular: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns


def chunk_products(spec: MemorySpec) -> list[Product]:
    """Of one chunk of one head, forward."""
    if spec.network != "mlp" or spec.optimizer == "muon" or set(spec.fast) != {"up", "down"}:
        raise ValueError("the count is written for network='mlp', all layers fast, optimizer='gd' or 'momentum'.")
    momentum = spec.carries_momentum
    products = [*_keys(spec), *_queries(spec, momentum), *_fold(spec, momentum), *_coefficients(spec, momentum)]
    return products + (_limiter(spec) if spec.limits_writes else [])


def forward_flops(spec: MemorySpec, batch: int, tokens: int, heads: int, *, strict: bool = False) -> float:
    """strict: triangular products count half."""
    per_chunk = sum(product.flops / (2 if strict and product.triangular else 1) for product in chunk_products(spec))
    return per_chunk * batch * heads * (tokens / spec.chunk)


def _sizes(spec: MemorySpec) -> tuple[int, int, int, int, int]:
    """C tokens, N tokens whose gradients are used, F features, M hidden units, V value width."""
    gradients = spec.chunk + spec.window - 1
    return spec.chunk, gradients, spec.feature_width, spec.hidden_width, spec.value_width


def _keys(spec: MemorySpec) -> list[Product]:
    _, N, F, M, V = _sizes(spec)
    return [
        Product("keys read W_up", N, F, M),
        Product("keys read W_down", N, M, V),
        Product("errors back through W_down", N, V, M),
    ]


def _queries(spec: MemorySpec, momentum: bool) -> list[Product]:
    C, N, F, M, V = _sizes(spec)
    carried = [Product("queries read S_up", C, F, M), Product("hidden reads S_down", C, M, V)]
    return [
        Product("queries read W_up", C, F, M),
        Product("kernel of queries and keys", C, spec.key_width, N, triangular=True),
        Product("(P ⊙ kernel) · deltas, up", C, N, M, triangular=True),
        Product("hidden reads W_down", C, M, V),
        Product("kernel of hidden activations", C, M, N, triangular=True),
        Product("(P ⊙ kernel) · deltas, down", C, N, V, triangular=True),
        *(carried if momentum else []),
    ]


def _fold(spec: MemorySpec, momentum: bool) -> list[Product]:
    _, N, F, M, V = _sizes(spec)
    carried = [Product("S_up of the next anchor", M, N, F), Product("S_down of the next anchor", V, N, M)]
    weights = [Product("W_up of the next anchor", M, N, F), Product("W_down of the next anchor", V, N, M)]
    return weights + (carried if momentum else [])


def _coefficients(spec: MemorySpec, momentum: bool) -> list[Product]:
    """B = decay(θ)·diag(η)·Γ and P = decay(α)·B; with window 1, Γ is the identity, and the first factor no product."""
    C, N, _, _, _ = _sizes(spec)
    factors = int(momentum) + int(spec.retention == "learned") - int(spec.window == 1)
    return [Product("decay · coefficients", C, C, N, triangular=True)] * max(factors, 0)


def _limiter(spec: MemorySpec) -> list[Product]:
    C, N, _, M, V = _sizes(spec)
    return [
        Product("Gram matrix of keys", N, spec.key_width, N, triangular=True),
        Product("Gram matrix of hidden activations", N, M, N, triangular=True),
        Product("(P + σB) · Gram, up", C, N, N, triangular=True),
        Product("(P + σB) · Gram, down", C, N, N, triangular=True),
        Product("curvature W_down · W_downᵀ", V, M, V, triangular=True),
    ]
