"""Matrix memories solved without staleness, against the recurrence, token by token, write limiter and all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atlas_memory import MemorySpec, Monitors
from atlas_memory.ops import memorize, memorize_reference
from tests.support import Problem, assert_close, make_problem, read

COUNT = 13


def _by_hand(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """One row, one head. Outputs (T, V), last weights (V, D), and the limiter ℓ (T,)."""
    spec = problem.spec
    queries, keys, values = (x[0, :, 0].detach() for x in problem.part(0)[:3])
    alpha, theta, eta, gamma = (None if g is None else g[0, :, 0].detach() for g in problem.gates)
    weight, momentum = problem.initial["down"][0].detach(), torch.zeros_like(problem.initial["down"][0])
    outputs, limits = [], []
    for t in range(COUNT):
        window = range(min(spec.window, t + 1))
        gates = torch.stack([torch.ones(()).double() if gamma is None else gamma[t, j] for j in window])
        inside = torch.stack([keys[t - j] for j in window])
        kept = torch.zeros(()).double() if theta is None else theta[t].clamp_max(spec.largest_momentum)
        rows = ((inside @ inside.mT).abs() @ gates) * eta[t] * (1 + kept) * (gates * eta[t] > 0)
        limits.append(1 / rows.max().clamp_min(1.0) if spec.limiter else torch.ones(()).double())
        at = alpha[t] * weight if spec.gradient_at == "decayed" else weight
        gradient = sum(gates[j] * torch.outer(at @ keys[t - j] - values[t - j], keys[t - j]) for j in window)
        momentum = kept * momentum + limits[-1] * eta[t] * gradient
        weight = alpha[t] * weight - momentum
        outputs.append(weight @ queries[t])
    return torch.stack(outputs), weight, torch.stack(limits)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window": 3},
        {"window": 9},
        {"optimizer": "momentum"},
        {"optimizer": "momentum", "window": 3},
        {"gradient_at": "decayed", "window": 3},
        {"gradient_at": "decayed", "optimizer": "momentum"},
    ],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()) or "plain",
)
def test_recurrence(fields: dict[str, Any], chunk: int) -> None:
    spec = MemorySpec(network="matrix", key_width=3, value_width=4, chunk=chunk, retraction=None, **fields)
    problem = make_problem(spec, batch=1, count=COUNT, heads=1)
    # longer keys, so that the limiter has something to do
    problem = problem.replace(keys=problem.keys.detach() * 1.5)
    monitors = Monitors()
    outputs, state = read(memorize, problem, monitors=monitors)
    expected, weight, limits = _by_hand(problem)
    assert limits.min() < 0.9
    assert_close(monitors.limiter["down"][0, :, 0], limits, "limiter")
    assert_close(outputs[0, :, 0], expected, "outputs")
    assert_close(state.tensors["weights.down"][0, 0], weight, "weights")


def test_long_keys_do_not_blow_up_under_the_limiter() -> None:
    """A full step with ‖k‖² = 9 multiplies the error by −8 with every repeat; limited, it learns at once."""
    spec = MemorySpec(network="matrix", key_width=2, chunk=16, retention="one")
    key = torch.tensor([3.0, 0.0], dtype=torch.float64).expand(1, 40, 1, 2)
    value = torch.ones(1, 40, 1, 2, dtype=torch.float64)
    outputs, _ = memorize(spec, key, key, value)
    assert_close(outputs, value)
    wild, _ = memorize(spec.replace(limiter=False), key, key, value)
    assert wild.abs().max() > 1e9


def test_state_holds_no_open_chunk() -> None:
    """Every token is final, so the state is weights and window only."""
    problem = make_problem(MemorySpec(network="matrix", key_width=3, chunk=8, window=3), count=5)
    _, state = read(memorize, problem)
    assert set(state.tensors) == {"weights.down", "window.keys", "window.values"}
    assert state.fill == (0, 0)


def test_rows_at_different_places_of_the_retraction_grid() -> None:
    """Momentum with regression is retracted every chunk of a row's own sequence, wherever the other rows are."""
    spec = MemorySpec(network="matrix", optimizer="momentum", key_width=3, chunk=4, retraction=0.05)
    first, second = make_problem(spec, batch=3, count=6), make_problem(spec, batch=3, count=7, seed=1)
    results = []
    for operator in (memorize, memorize_reference):
        _, state = read(operator, first, lengths=[6, 3, 0])
        results.append(read(operator, second, state=state))
    (outputs, state), (expected, expected_state) = results
    assert_close(outputs, expected, "outputs")
    assert_close(state.tensors["weights.down"], expected_state.tensors["weights.down"], "weights")
