"""φ*: memories whose first layer lives in an infinite feature space are what they claim to be (docs/method.md §8)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory import MemorySpec, presets
from atlas_memory.ops import memorize, memorize_reference
from tests.support import Problem, assert_close, assert_same, make_problem, read, solve

WIDTH, COUNT = 4, 13
MATRIX = {"feature": "exponential", "network": "matrix", "retention": "one", "key_width": WIDTH, "chunk": 4}


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.movedim(2, 1) for tensor in tensors]


def _attention(problem: Problem, visible: Tensor | None = None) -> Tensor:
    queries, keys, values = _heads_first(problem.queries, problem.keys, problem.values)
    sharpness = float(problem.coefficients.detach())
    options: dict[str, Any] = {"is_causal": True} if visible is None else {"attn_mask": visible}
    return F.scaled_dot_product_attention(queries, keys, values, scale=sharpness, **options).movedim(1, 2)


def _ages(count: int) -> Tensor:
    return torch.arange(count)[:, None] - torch.arange(count)


@pytest.mark.parametrize("splits", [[], [1, 5, 6]])
def test_transformer_is_softmax_attention(splits: list[int]) -> None:
    problem = make_problem(presets.make("transformer", key_width=WIDTH), count=COUNT)
    answers, state = read(memorize, problem, splits)
    torch.testing.assert_close(answers, _attention(problem), rtol=1e-12, atol=1e-12)
    assert torch.equal(state.tensors["cache.down"], problem.values)


@pytest.mark.parametrize("splits", [[], [1, 5, 6]])
def test_transformer_with_a_horizon_is_sliding_window_attention(splits: list[int]) -> None:
    problem = make_problem(presets.make("transformer", key_width=WIDTH, horizon=5), count=COUNT)
    ages = _ages(COUNT)
    answers, state = read(memorize, problem, splits)
    torch.testing.assert_close(answers, _attention(problem, (ages >= 0) & (ages < 5)), rtol=1e-12, atol=1e-12)
    assert state.tensors["cache.keys"].shape[1] == 5


@pytest.mark.parametrize("horizon", [None, 5])
def test_without_the_norm_it_is_the_plain_sum(horizon: int | None) -> None:
    """Eq. 26."""
    spec = presets.make("transformer", normalised=False, key_width=WIDTH, horizon=horizon, chunk=4)
    problem = make_problem(spec, count=COUNT)
    queries, keys, values = _heads_first(problem.queries, problem.keys, problem.values)
    ages = _ages(COUNT)
    visible = (ages >= 0) & (ages < (horizon or COUNT))
    kernel = torch.exp(problem.coefficients * (queries @ keys.mT - 1)) * visible
    torch.testing.assert_close(read(memorize, problem)[0], (kernel @ values).movedim(1, 2), rtol=1e-12, atol=1e-12)


def test_regression_with_a_matrix_is_the_kernel_delta_rule() -> None:
    """Errors solve the triangular system (I + tril(K diag(η))) E = −V; answers are sums over them."""
    problem = make_problem(MemorySpec(**MATRIX, limiter=False), count=COUNT)
    queries, keys, values = _heads_first(problem.queries, problem.keys, problem.values)
    step = problem.gates.step.movedim(2, 1)[..., None, :]
    sharpness = problem.coefficients
    gram = torch.exp(sharpness * (keys @ keys.mT - 1)) * step
    system = torch.eye(COUNT, dtype=torch.float64) + gram.tril(-1)
    errors = torch.linalg.solve_triangular(system, -values, upper=False)
    kernel = (torch.exp(sharpness * (queries @ keys.mT - 1)) * step).tril()
    torch.testing.assert_close(read(memorize, problem)[0], -(kernel @ errors).movedim(1, 2), rtol=1e-10, atol=1e-10)


DEEP = {"feature": "exponential", "network": "mlp", "retention": "one", "key_width": 2, "expansion": 2, "chunk": 3}


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("fields", [MATRIX | {"key_width": 2}, DEEP | {"initial_pairs": 0}], ids=["matrix", "mlp"])
def test_taylor_features_of_growing_degree_tend_to_it(fields: dict[str, Any], window: int) -> None:
    """The definition, on explicit features of the Taylor series, differs by what the series leaves out."""
    problem = make_problem(MemorySpec(**fields, window=window), batch=1, count=7, heads=1)
    answers, _ = read(memorize, problem)
    sharpness = float(problem.coefficients.detach())
    errors = []
    for degree in (2, 5, 8, 15):
        terms = [math.exp(-sharpness) * sharpness**i / math.factorial(i) for i in range(degree + 1)]
        finite = {"feature": "polynomial", "degree": degree, "initial_pairs": None}
        spec = MemorySpec(**{**fields, **finite}, window=window)
        initial = dict(problem.initial)
        for site in spec.feature_sites:
            initial[site] = torch.zeros(1, *spec.site_shapes()[site], dtype=torch.float64)
        initial.pop("pairs")
        coefficients = torch.tensor(terms, dtype=torch.float64).sqrt()
        taylor = problem.replace(spec=spec, initial=initial, coefficients=coefficients)
        errors.append(float((read(memorize_reference, taylor)[0] - answers).detach().abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-8 < 1e-3 < errors[0]


def test_deep_transformer_contains_the_transformer() -> None:
    """Strictly: σ the identity, hidden width that of values, W1 = I and not fast, no residual, no initial pairs."""
    reduced = presets.make(
        "deep_transformer",
        activation="identity",
        expansion=1,
        fast=("up",),
        residual=False,
        initial_pairs=0,
        step="one",
        key_width=WIDTH,
        chunk=4,
    )
    problem = make_problem(presets.make("transformer", normalised=False, key_width=WIDTH), count=COUNT)
    identity = torch.eye(WIDTH, dtype=torch.float64).expand(2, -1, -1)
    initial = {"up": torch.zeros(2, WIDTH, 0), "down": identity, "pairs": torch.zeros(2, 0, WIDTH)}
    initial = {name: tensor.to(torch.float64) for name, tensor in initial.items()}
    answers, _ = read(memorize, problem.replace(spec=reduced, initial=initial))
    torch.testing.assert_close(answers, read(memorize, problem)[0], rtol=1e-12, atol=1e-12)


def test_a_horizon_as_long_as_the_sequence_is_none() -> None:
    fields = {"key_width": 3, "chunk": 4, "initial_pairs": 2}
    problem = make_problem(presets.make("swdt", horizon=COUNT + 1, **fields), count=COUNT)
    without = problem.replace(spec=presets.make("deep_transformer", **fields))
    answers, expected = read(memorize, problem)[0], read(memorize, without)[0]
    assert_close(answers, expected, "outputs")


@pytest.mark.parametrize("network", ["matrix", "mlp", "gated_mlp"])
@pytest.mark.parametrize("objective", ["dot", "regression"])
@pytest.mark.parametrize(
    "fields",
    [
        {"window": 3, "horizon": 5},
        {"gradient_at": "decayed", "retention": "learned", "window": 3},
        {"surprise_retention": 1.0, "retention": "learned", "horizon": 4},
        {"write_cap": 0.5, "retraction": 0.2},
        {"chunk": 1, "window": 3, "horizon": 3},
    ],
    ids=lambda fields: ",".join(map(str, fields)),
)
def test_engine_equals_the_definition_beyond_the_presets(network: str, objective: str, fields: dict[str, Any]) -> None:
    spec = MemorySpec(
        **{"feature": "exponential", "network": network, "objective": objective, "key_width": 3, "chunk": 4, **fields}
    )
    problem, lengths = make_problem(spec, count=COUNT), [COUNT, 6]
    assert_same(
        solve(memorize, problem, lengths=lengths, splits=[2, 7]), solve(memorize_reference, problem, lengths=lengths)
    )


@pytest.mark.parametrize("fast", [("down",), ("up",), ("gate", "down")], ids=str)
def test_layers_that_do_not_learn(fast: tuple[str, ...]) -> None:
    spec = MemorySpec(feature="exponential", network="gated_mlp", key_width=3, chunk=4, fast=fast, initial_pairs=3)
    problem = make_problem(spec, count=COUNT)
    assert_same(solve(memorize, problem, splits=[6]), solve(memorize_reference, problem))
