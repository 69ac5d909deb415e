"""Monitors against what they claim to measure, computed from the definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from atlas_memory import MemorySpec, Monitors, presets
from atlas_memory.ops import Gates, memorize, memorize_reference
from atlas_memory.ops.features import feature_map
from atlas_memory.ops.networks import memory_network
from atlas_memory.ops.sites import Dense
from tests.support import SMALL, Problem, assert_close, make_problem, read, small_spec

HEADS = 2


def _gradient(spec: MemorySpec, weights: Mapping[str, Tensor], key: Tensor, value: Tensor, c: Tensor | None) -> Tensor:
    """∇ℓ of one token (H, D) at weights {site: (H, out, in)}, over all fast layers (H, everything)."""
    fast = {site: weights[site].detach().requires_grad_() for site in spec.fast}
    features = feature_map(spec, c, key).expand(key)
    prediction = memory_network(spec).forward(Dense({**weights, **fast}), features[:, None], key[:, None])[:, 0]
    dot = spec.objective == "dot"
    loss = -(prediction * value).sum() if dot else 0.5 * (prediction - value).square().sum()
    gradients = torch.autograd.grad(loss, list(fast.values()))
    return torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)


def _sequence(problems: list[Problem], lengths: list[list[int]], row: int) -> list[tuple[Tensor, ...]]:
    """(key, value, window gates) of every token a row reads, over several calls."""
    found = []
    for problem, real in zip(problems, lengths, strict=True):
        _, keys, values, gates = problem.part(0)
        window = torch.ones(*keys.shape[:3], 1, dtype=torch.float64) if gates.window is None else gates.window
        found += [(keys[row, t], values[row, t], window[row, t]) for t in range(real[row])]
    return found


def _expected(problems: list[Problem], lengths: list[list[int]], row: int) -> tuple[Tensor, Tensor]:
    """Surprise and context surprise of the last call's tokens (n, H): the state before each from the definition."""
    spec, tokens = problems[0].spec, _sequence(problems, lengths, row)
    whole = [
        torch.cat([p.part(0)[i][row : row + 1, : n[row]] for p, n in zip(problems, lengths, strict=True)], 1)
        for i in range(3)
    ]
    gates = Gates(
        *(
            None
            if parts[0] is None
            else torch.cat([g[row : row + 1, : n[row]] for g, n in zip(parts, lengths, strict=True)], 1)
            for parts in zip(*(p.gates for p in problems), strict=True)
        )
    )
    one = Problem(spec, *whole, gates, problems[0].initial, problems[0].coefficients)
    surprises, contexts, state = [], [], None
    for t, (_, _, window) in enumerate(tokens):
        weights = problems[0].initial
        if state is not None:
            weights = {site: weight[0] for site, weight in state.group("weights").items()}
        parts = [_gradient(spec, weights, *tokens[t - j][:2], one.coefficients) for j in range(min(spec.window, t + 1))]
        surprises.append(parts[0].norm(dim=-1))
        contexts.append(sum(window[:, j, None] * part for j, part in enumerate(parts)).norm(dim=-1))
        initial = one.initial if state is None else None
        _, state = memorize_reference(spec, *one.part(t, t + 1), initial, state=state, coefficients=one.coefficients)
    new = lengths[-1][row]
    return torch.stack(surprises)[-new:], torch.stack(contexts)[-new:]


CASES: dict[str, dict[str, Any]] = {
    # rows of the second call stand at different places of Muon's schedule: they are worked on in groups
    "phases": {"network": "mlp", "optimizer": "muon", "interval": 3, "window": 3},
    "exact": {"network": "matrix", "window": 3},
    "exact with phases": {"network": "matrix", "optimizer": "momentum", "window": 3},
    "dot": {"network": "gated_mlp", "objective": "dot", "feature": "polynomial", "fast": ("gate", "down")},
    "window over the chunk": {"network": "mlp", "window": 7},
}


@pytest.mark.parametrize("name", CASES)
def test_surprise_is_the_norm_of_the_gradient(name: str) -> None:
    """Of the token, and of its window, also with ragged rows that go on from ragged states."""
    spec, lengths = MemorySpec(**{**SMALL, **CASES[name]}), [[5, 9], [7, 3]]
    first, second = make_problem(spec, count=9), make_problem(spec, count=7, seed=1)
    second = second.replace(initial=first.initial, coefficients=first.coefficients)
    _, state = read(memorize, first, lengths=lengths[0])
    monitors = Monitors()
    read(memorize, second, lengths=lengths[1], state=state, monitors=monitors)
    assert monitors.surprise.shape == monitors.context_surprise.shape == (2, 7, HEADS)
    for row in range(2):
        surprise, context = _expected([first, second], lengths, row)
        real = lengths[1][row]
        assert_close(monitors.surprise[row, :real], surprise, "surprise")
        assert_close(monitors.context_surprise[row, :real], context, "context surprise")
        assert not monitors.surprise[row, real:].any()
        assert not monitors.context_surprise[row, real:].any()


@pytest.mark.parametrize("preset", presets.names())
def test_watching_changes_nothing(preset: str) -> None:
    problem = make_problem(small_spec(preset))
    monitors = Monitors()
    (watched, watched_state), (plain, plain_state) = read(memorize, problem, monitors=monitors), read(memorize, problem)
    assert torch.equal(watched, plain)
    for name, tensor in plain_state.tensors.items():
        assert torch.equal(watched_state.tensors[name], tensor)
    assert torch.isfinite(monitors.surprise).all()
    assert (monitors.surprise > 0).any()


def _limits_by_loops(gates: list[Tensor], keys: Tensor) -> Tensor:
    """ℓ_t = 1/max(1, max_i Σ_j (P_tj + σ_t B_tj)|G_ij|), i over the tokens written: of one head's first chunk (T,)."""
    gram, count = (keys @ keys.mT).abs(), len(keys)
    writes, gathers = torch.zeros(2, count, dtype=torch.float64)
    crossing, kept, limits = 0.0, 1.0, []
    for t, (alpha, theta, eta) in enumerate(zip(*gates, strict=True)):
        gathers = theta * gathers + eta * torch.eye(count, dtype=torch.float64)[t]
        writes = alpha * writes + gathers
        kept = theta * kept
        crossing = alpha * crossing + kept
        step = writes + crossing * gathers
        rows = (gram @ step)[step > 0]
        limits.append(1 / max(1.0, float(rows.max()) if len(rows) else 0.0))
    return torch.tensor(limits, dtype=torch.float64)


def test_limiter_is_gershgorins_bound() -> None:
    spec = MemorySpec(network="matrix", write_cap=1e9, optimizer="momentum", key_width=3, chunk=8)
    problem = make_problem(spec, count=8).with_gates_inside()
    monitors = Monitors()
    read(memorize, problem, monitors=monitors)
    for row in range(2):
        for head in range(HEADS):
            alpha, theta, eta = (gate[row, :, head].detach() for gate in problem.gates[:3])
            gates = [alpha, theta.clamp_max(spec.largest_momentum), eta]
            expected = _limits_by_loops(gates, problem.keys[row, :, head].detach())
            torch.testing.assert_close(monitors.limiter["down"][row, :, head], expected, rtol=1e-9, atol=0)
            assert expected.min() < 0.7


def _limiter(keys: Tensor, step: float, **fields: Any) -> dict[str, Tensor]:
    """The limiter's activity on keys (T, D), one head."""
    count, width = keys.shape
    spec = MemorySpec(key_width=width, chunk=count, retention="one", **fields)
    initial = {site: torch.randn(1, *shape, dtype=torch.float64) for site, shape in spec.site_shapes().items()}
    gates = Gates(step=torch.full((1, count, 1), step, dtype=torch.float64))
    monitors, tokens = Monitors(), keys[None, :, None]
    memorize(spec, tokens, tokens, torch.randn_like(tokens), gates, initial, monitors=monitors)
    return {site: limits[0, :, 0] for site, limits in monitors.limiter.items()}


def test_limiter_sleeps_on_well_spread_keys_and_wakes_on_repeats() -> None:
    orthonormal = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    anchored: dict[str, Any] = {"network": "matrix", "write_cap": 1e9}
    assert_close(_limiter(orthonormal, 1.0, **anchored)["down"], torch.ones(8, dtype=torch.float64))
    repeated = _limiter(orthonormal[:1].expand(8, 8), 1.0, **anchored)["down"]
    assert_close(repeated, 1 / torch.arange(1, 9, dtype=torch.float64))


def test_limiter_ignores_tokens_that_are_not_written() -> None:
    """A key of no step may be as long as it likes."""
    keys = torch.eye(4, dtype=torch.float64)
    keys[2] = 1e3
    spec = MemorySpec(network="matrix", write_cap=1e9, key_width=4, chunk=4, retention="one")
    monitors, tokens = Monitors(), keys[None, :, None]
    step = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)[None, :, None]
    memorize(spec, tokens, tokens, tokens, Gates(step=step), monitors=monitors)
    assert_close(monitors.limiter["down"], torch.ones(1, 4, 1, dtype=torch.float64))


@pytest.mark.parametrize("network", ["mlp", "gated_mlp"])
def test_limiter_reports_every_fast_layer(network: str) -> None:
    keys = torch.nn.functional.normalize(torch.randn(1, 6, dtype=torch.float64), dim=-1).expand(8, 6)
    limits = _limiter(keys, 1.0, network=network)
    assert set(limits) == set(MemorySpec(network=network).fast)
    for site, values in limits.items():
        assert (values > 0).all(), site
        assert values[-1] < 1, site
        assert (values.diff() <= 1e-12).all(), site  # every repeat makes the bound tighter


@pytest.mark.parametrize("fields", [{"limiter": False}, {"objective": "dot"}])
def test_no_limiter_no_report(fields: dict[str, Any]) -> None:
    monitors = Monitors()
    read(memorize, make_problem(MemorySpec(**{**SMALL, **fields})), monitors=monitors)
    assert monitors.limiter == {}


@pytest.mark.parametrize("window", [1, 3])
def test_mean_write_is_the_mean_over_real_tokens(window: int) -> None:
    problem, lengths = make_problem(MemorySpec(**SMALL, window=window), count=6), [6, 2]
    monitors = Monitors()
    read(memorize, problem, lengths=lengths, monitors=monitors)
    eta, gamma = problem.gates.step, problem.gates.window
    written = eta if gamma is None else eta * gamma.mean(-1)
    expected = torch.cat([written[row, :n] for row, n in enumerate(lengths)]).mean()
    assert_close(monitors.mean_write, expected)
    gradient, expected_gradient = (
        torch.autograd.grad(x, eta, retain_graph=True)[0] for x in (monitors.mean_write, expected)
    )
    assert_close(gradient, expected_gradient)


def test_mean_write_counts_all_groups_of_rows() -> None:
    spec = MemorySpec(**{**SMALL, **CASES["phases"]})
    first, second = make_problem(spec, count=9), make_problem(spec, count=6, seed=1)
    _, state = read(memorize, first, lengths=[4, 9])
    monitors = Monitors()
    read(memorize, second, lengths=[6, 1], state=state, monitors=monitors)
    written = (second.gates.step + second.gates.window.mean(-1)) / 2  # Muon's: each gate leaves a trace of its own
    assert_close(monitors.mean_write, torch.cat([written[0, :6], written[1, :1]]).mean())


def test_norms_retraction_and_gates() -> None:
    """Norms at the last anchor; the smallest factor of all retractions; gates as they were used."""
    problem = make_problem(small_spec("titans", objective="dot", retraction=0.3), count=9)
    monitors = Monitors()
    _, state = read(memorize, problem, monitors=monitors)
    for site, weight in state.group("weights").items():
        assert_close(monitors.weight_norms[site], weight.flatten(2).norm(dim=-1))
    assert set(monitors.retraction) == {f"{kind}.{s}" for kind in ("weights", "momentum") for s in problem.spec.fast}
    for leaf, factor in monitors.retraction.items():
        assert factor.shape == (2, HEADS)
        assert ((factor > 0) & (factor <= 1)).all(), leaf
    assert min(float(factor.min()) for factor in monitors.retraction.values()) < 0.9
    largest = problem.spec.largest_momentum
    assert_close(monitors.gates.momentum, problem.gates.momentum.clamp_max(largest))
    assert_close(monitors.gates.step, problem.gates.step)


@pytest.mark.parametrize("idle", [0, 1])
def test_a_group_of_rows_without_tokens(idle: int) -> None:
    spec = small_spec("deltanet", optimizer="momentum")
    first, second = make_problem(spec, count=7), make_problem(spec, count=5, seed=1)
    _, state = read(memorize, first, lengths=[7, 2])
    monitors, lengths = Monitors(), [5, 5]
    lengths[idle] = 0
    read(memorize, second, lengths=lengths, state=state, monitors=monitors)
    limits = monitors.limiter["down"]
    assert (limits[idle] == 0).all() and ((limits[1 - idle] > 0) & (limits[1 - idle] <= 1)).all()


@pytest.mark.parametrize("count", [3, SMALL["chunk"]])
def test_a_call_without_tokens_writes_nothing(count: int) -> None:
    problem = make_problem(small_spec("atlas"), count=count)
    _, state = read(memorize, problem)
    monitors = Monitors()
    memorize(problem.spec, *problem.part(0, 0), state=state, coefficients=problem.coefficients, monitors=monitors)
    assert monitors.surprise is None or monitors.surprise.numel() == 0
    assert monitors.mean_write.detach() == 0
