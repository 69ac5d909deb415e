"""The guards one by one, and what they are for; the promise they keep together is in tests/invariants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atlas_memory import MemorySpec, Monitors
from atlas_memory.ops import Gates, memorize, recall
from atlas_memory.ops.stability import (
    cap,
    normalise,
    root_mean_square_norm,
    safe_norm,
    shrink_factor,
    squared_norm_bound,
    surprise_weighted,
)
from tests.support import make_problem, read

MAGNITUDES = [0.0, 1e-38, 1e-30, 1e-10, 1.0, 1e10, 1e30]
SAFE = {
    "normalise": normalise,
    "root mean square": lambda x: root_mean_square_norm(x, torch.ones(4)),
    "cap": lambda x: cap(x, 1.0),
    "norm": lambda x: safe_norm(x, -1),
}


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", SAFE)
def test_finite_for_any_finite_input(name: str, magnitude: float) -> None:
    x = (torch.tensor([[1.0, -0.5, 0.0, 0.25], [1.0, 1.0, 1.0, 1.0]]) * magnitude).requires_grad_()
    y = SAFE[name](x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.isfinite(y).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e30])
def test_normalise_gives_unit_vectors(magnitude: float) -> None:
    norms = normalise(torch.randn(5, 4) * magnitude).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones(5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("magnitude", [1.0, 1e30])
def test_root_mean_square_norm_gives_unit_mean_squares(magnitude: float) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = root_mean_square_norm(torch.randn(5, 4) * magnitude, weight)
    torch.testing.assert_close((y / weight).square().mean(-1), torch.ones(5), rtol=1e-3, atol=0)


def test_cap_is_the_identity_below_its_limit() -> None:
    x = torch.tensor([[0.3, 0.4], [3.0, 4.0], [0.0, 0.0]])
    y = cap(x, 1.0)
    assert torch.equal(y[[0, 2]], x[[0, 2]])
    torch.testing.assert_close(y[1], torch.tensor([0.6, 0.8]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("function", [normalise, lambda x: cap(x, 1.0), lambda x: safe_norm(x, -1)])
def test_gradients_see_through_the_scaling(function) -> None:
    """Scaling by the largest entry cancels: no gradient of it may be missing."""
    assert torch.autograd.gradcheck(function, (torch.randn(3, 4, dtype=torch.float64, requires_grad=True),))


def test_shrink_factor() -> None:
    factor = shrink_factor(torch.tensor([0.0, 1.0, 2.0, 4.0, torch.inf]), 2.0)
    torch.testing.assert_close(factor, torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0]), rtol=1e-4, atol=0)


def test_what_was_shrunk_counts_as_inside() -> None:
    norm = torch.logspace(0, 6, 200)
    once = norm * shrink_factor(norm, 1.0)
    assert torch.equal(shrink_factor(once, 1.0), torch.ones(200))


def test_surprise_weighs_retention() -> None:
    retention = torch.tensor([0.5, 0.5, 0.5, 0.0, 1.0]).double()
    surprise = torch.tensor([0.0, 3.0, 1e12, 3.0, 3.0]).double()
    weighted = surprise_weighted(retention, surprise, 3.0)
    torch.testing.assert_close(weighted, torch.tensor([1.0, 0.5, 0.25, 0.0, 1.0]).double(), rtol=1e-6, atol=1e-12)


def test_squared_norm_bound_holds() -> None:
    weight = torch.randn(50, 3, 7)
    exact = torch.linalg.matrix_norm(weight, ord=2).square()
    bound = squared_norm_bound(weight).flatten()
    assert (bound >= exact * (1 - 1e-5)).all()
    assert (bound <= exact * 3).all()


# What the guards are for. Anchored memories only: exact ones are solved token by token.


def _associations(count: int, width: int) -> tuple[Tensor, Tensor]:
    """Orthonormal keys and random values (1, T, 1, D)."""
    keys = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q[:count]
    return keys[None, :, None], torch.randn(1, count, 1, width, dtype=torch.float64)


# An unreachable cap keeps the matrix on the chunk's anchor. A linear network whose second layer is a multiple of the
# identity puts the same matrix below another layer, whose curvature the limiter has to see.
BELOW: dict[str, Any] = {
    "network": "mlp",
    "activation": "identity",
    "fast": ("up",),
    "residual": False,
    "expansion": 1,
}
ANCHORED: dict[str, dict[str, Any]] = {
    "matrix": {"network": "matrix", "write_cap": 1e9},
    "first layer": BELOW,
    "momentum": {"network": "matrix", "write_cap": 1e9, "optimizer": "momentum"},
}


def _recall_error(width: int, above: float = 1.0, **fields: Any) -> float:
    """Of one chunk of orthonormal keys. `above`: the second layer is this multiple of the identity."""
    spec = MemorySpec(key_width=width, chunk=width, retention="one", step="one", **fields)
    keys, values = _associations(width, width)
    initial = {site: torch.zeros(1, *shape, dtype=torch.float64) for site, shape in spec.site_shapes().items()}
    if spec.network != "matrix":
        initial["down"] = above * torch.eye(width, dtype=torch.float64)[None]
    gates = Gates(momentum=torch.zeros(1, width, 1, dtype=torch.float64) if spec.carries_momentum else None)
    _, state = memorize(spec, keys, keys, values, gates, initial)
    answers = recall(spec, keys, state)
    return float((answers - values).norm() / values.norm())


@pytest.mark.parametrize("limiter", [True, False])
@pytest.mark.parametrize("name", ANCHORED)
def test_orthonormal_keys_are_all_learned(name: str, limiter: bool) -> None:
    """64 keys in one chunk, each with a full step: a bound by the sum of all steps would leave 1/64 of each."""
    assert _recall_error(64, limiter=limiter, **ANCHORED[name]) < 1e-9


def test_limiter_sees_the_layers_above() -> None:
    """W1 = 3I makes every step nine times too long: limited to a ninth, it is exact."""
    assert _recall_error(8, above=3.0, limiter=True, **BELOW) < 1e-9
    assert _recall_error(8, above=3.0, limiter=False, **BELOW) > 7


def _repeated_key(count: int, **fields: Any) -> tuple[Tensor, Tensor]:
    """Norms of the weights after each of many calls that repeat one association; and the last answer's error."""
    spec = MemorySpec(network="matrix", key_width=4, chunk=16, write_cap=1e300, retraction=None, **fields)
    key = torch.nn.functional.normalize(torch.ones(1, count, 1, 4, dtype=torch.float64), dim=-1)
    value = torch.ones(1, count, 1, 4, dtype=torch.float64)
    gate = torch.ones(1, count, 1, dtype=torch.float64)
    momentum = gate * 0.99 if spec.carries_momentum else None
    outputs, state = memorize(spec, key, key, value, Gates(retention=gate, momentum=momentum, step=gate))
    return state.tensors["weights.down"].norm(), (outputs[0, -1] - value[0, -1]).norm()


@pytest.mark.parametrize("optimizer", ["gd", "momentum"])
def test_repeated_keys_overshoot_only_without_the_limiter(optimizer: str) -> None:
    """16 full steps along one gradient, taken once: 16 times too far, and again in every chunk."""
    free, _ = _repeated_key(640, optimizer=optimizer, limiter=False)
    limited, _ = _repeated_key(640, optimizer=optimizer, limiter=True)
    assert free > 1e6
    assert limited < 100


def test_repeated_key_is_learned_under_the_limiter() -> None:
    _, error = _repeated_key(640, optimizer="gd", limiter=True)
    assert error < 1e-6


@pytest.mark.parametrize("above", [1.0, 3.0])
@pytest.mark.parametrize("step", [0.01, 1.0])
def test_muon_stops_at_the_minimum_along_its_step(step: float, above: float) -> None:
    """Small steps are taken whole; large ones end where the loss that its momentum gathered is flat along the step."""
    spec = MemorySpec(optimizer="muon", key_width=3, chunk=4, retention="one", **BELOW)
    problem = make_problem(spec, batch=1, count=4, heads=1).with_gates_inside()
    momentum = problem.gates.momentum.detach().clamp_max(spec.largest_momentum)
    gates = Gates(momentum=momentum, step=torch.full((1, 4, 1), step, dtype=torch.float64))
    initial = {**problem.initial, "down": above * torch.eye(3, dtype=torch.float64)[None]}
    monitors = Monitors()
    _, state = read(memorize, problem.replace(gates=gates, initial=initial), monitors=monitors)
    keys, values = problem.keys[0, :, 0].detach(), problem.values[0, :, 0].detach()
    weights = torch.stack([momentum[0, i + 1 :, 0].prod() for i in range(4)])  # of the tokens in the momentum
    before, after = initial["up"][0].detach(), state.tensors["weights.up"][0, 0].detach()
    slopes = []
    for weight in (before, after):
        errors = above * keys @ weight.mT - values
        gradient = above * (weights[:, None] * errors).mT @ keys
        slopes.append(float((gradient * (after - before)).sum()))
    limit = float(monitors.limiter["up"][0, -1, 0].detach())
    assert slopes[0] < 0
    if step < 0.1:
        assert limit == 1
        assert slopes[1] < 0
    else:
        assert limit < 1
        assert abs(slopes[1]) < 1e-6 * abs(slopes[0])


def test_muon_settles_only_under_the_limiter() -> None:
    """Above the floor, a step has the same size however small the error: unlimited, it circles around the minimum."""
    errors = {}
    shared = {"network": "matrix", "optimizer": "muon", "key_width": 4, "chunk": 4, "retention": "one"}
    for limiter in (True, False):
        spec = MemorySpec(limiter=limiter, momentum_floor=1.0, **shared)
        key = torch.eye(4, dtype=torch.float64)[:1].expand(1, 400, 1, 4)
        gate = torch.full((1, 400, 1), 0.2, dtype=torch.float64)
        outputs, _ = memorize(spec, key, key, torch.ones_like(key), Gates(momentum=gate, step=gate))
        errors[limiter] = float((outputs[0, -1] - 1).norm())
    assert errors[True] < 1e-3
    assert errors[False] > 0.05


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_retraction_bounds_the_root_mean_square_entry(bound: float) -> None:
    """The dot objective with a deep memory is unbounded below."""
    spec = MemorySpec(network="mlp", objective="dot", key_width=3, expansion=2, chunk=4, retraction=bound)
    free = spec.replace(retraction=None)
    initial = {site: torch.randn(1, *shape, dtype=torch.float64) for site, shape in spec.site_shapes().items()}
    keys, values = torch.randn(2, 1, 64, 1, 3, dtype=torch.float64)
    gates = Gates(step=torch.ones(1, 64, 1, dtype=torch.float64))
    roots = {}
    for chosen in (spec, free):
        _, state = memorize(chosen, keys, keys, values, gates, initial)
        weights = state.group("weights").values()
        roots[chosen.retraction] = max(float(weight.square().mean().sqrt()) for weight in weights)
    assert roots[None] > 10 * bound
    assert bound * 0.5 < roots[bound] <= bound * (1 + 1e-9)


def test_long_momentum_is_shortened_to_its_chunk() -> None:
    """Only where the limiter is on: θ ≤ 1 − 1/(b + 1)."""
    shared = {"network": "matrix", "optimizer": "momentum", "key_width": 2, "chunk": 4}
    keys, values = torch.randn(2, 1, 6, 1, 2, dtype=torch.float64) * 0.1
    gate = torch.full((1, 6, 1), 0.5, dtype=torch.float64)
    outputs = {}
    for limiter in (True, False):
        for theta in (0.8, 1.0):
            gates = Gates(retention=gate, momentum=torch.full_like(gate, theta), step=gate)
            outputs[limiter, theta], _ = memorize(MemorySpec(limiter=limiter, **shared), keys, keys, values, gates)
    assert torch.equal(outputs[True, 1.0], outputs[True, 0.8])
    assert not torch.allclose(outputs[False, 1.0], outputs[False, 0.8])
