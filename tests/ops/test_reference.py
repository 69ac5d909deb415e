"""The definition against the equations of the paper, written down once more in the plainest way, guards off."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory import MemorySpec
from atlas_memory.ops import memorize, memorize_reference, newton_schulz
from tests.support import Problem, assert_close, make_problem, read

COUNT, CHUNK, WINDOW = 11, 4, 3
UNGUARDED: dict[str, Any] = {
    "key_width": 3,
    "chunk": CHUNK,
    "window": WINDOW,
    "limiter": False,
    "retraction": None,
}
Weights = dict[str, Tensor]


def _mlp(weights: Weights, x: Tensor) -> Tensor:
    """x + W1 σ(W2 x) (eq. 42), hidden activations scaled to unit norm."""
    hidden = F.gelu(weights["up"] @ x) / math.sqrt(0.425 * len(weights["up"]))
    return x + weights["down"] @ hidden


def _matrix(weights: Weights, x: Tensor) -> Tensor:
    return weights["down"] @ x


NETWORKS = {"mlp": _mlp, "matrix": _matrix}


def _gradient(spec: MemorySpec, weights: Weights, key: Tensor, value: Tensor) -> Weights:
    at = {site: weight.detach().requires_grad_() for site, weight in weights.items()}
    loss = 0.5 * (NETWORKS[spec.network](at, key) - value).square().sum()
    return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))


def _by_hand(problem: Problem) -> tuple[Tensor, Weights]:
    """One row, one head: eq. 10–13 and 32–33, gradients at the chunk's anchor (eq. 16) or, if exact, token by token."""
    spec = problem.spec
    queries, keys, values = (x[0, :, 0].detach() for x in problem.part(0)[:3])
    alpha, theta, eta, gamma = (None if g is None else g[0, :, 0].detach() for g in problem.gates)
    now = {site: weight[0].detach() for site, weight in problem.initial.items()}
    momentum = {site: torch.zeros_like(weight) for site, weight in now.items()}
    gathered, anchor, outputs = 0.0, now, []
    for t in range(COUNT):
        if t % spec.anchor_chunk == 0:
            anchor = now
        windowed = {site: torch.zeros_like(weight) for site, weight in now.items()}
        for j in range(min(WINDOW, t + 1)):
            for site, part in _gradient(spec, anchor, keys[t - j], values[t - j]).items():
                windowed[site] = windowed[site] + gamma[t, j] * part
        step = 1 if spec.optimizer == "muon" else eta[t]
        kept = 0 if theta is None else theta[t]
        momentum = {site: kept * momentum[site] + step * windowed[site] for site in now}
        now = {site: alpha[t] * weight for site, weight in now.items()}
        if spec.optimizer != "muon":
            now = {site: weight - momentum[site] for site, weight in now.items()}
        else:
            gathered = alpha[t] * gathered + eta[t]
            if (t + 1) % spec.interval == 0:
                steps = {
                    site: newton_schulz(m, spec.newton_schulz_steps, spec.momentum_floor)
                    for site, m in momentum.items()
                }
                now = {site: weight - gathered * steps[site] for site, weight in now.items()}
                gathered = 0.0
        outputs.append(NETWORKS[spec.network](now, queries[t]))
    return torch.stack(outputs), anchor


@pytest.mark.parametrize("operator", [memorize_reference, memorize])
@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "gd"},
        {"optimizer": "momentum"},
        {"optimizer": "muon"},
        {"optimizer": "muon", "interval": 3},
        {"optimizer": "muon", "interval": 1},
    ],
    ids=lambda fields: ",".join(map(str, fields.values())),
)
@pytest.mark.parametrize("network", NETWORKS)
def test_equations(network: str, fields: dict[str, Any], operator) -> None:
    spec = MemorySpec(network=network, activation="gelu", expansion=2, **UNGUARDED, **fields)
    problem = make_problem(spec, batch=1, count=COUNT, heads=1)
    outputs, state = read(operator, problem)
    expected, weights = _by_hand(problem)
    assert_close(outputs[0, :, 0], expected, "outputs")
    if not spec.exact:  # whose state is that after the last token, not that of the last anchor
        for site, weight in weights.items():
            assert_close(state.tensors[f"weights.{site}"][0, 0], weight, f"weights.{site}")


def test_muon_moves_only_at_its_update_points() -> None:
    """Positions ≡ r − 1 (mod r) from the sequence's own start; between them, reads see decayed weights."""
    spec = MemorySpec(network="matrix", optimizer="muon", interval=3, key_width=3, chunk=CHUNK, retention="one")
    problem = make_problem(spec, batch=1, count=COUNT, heads=1).with_gates_inside()
    problem = problem.replace(queries=problem.queries[:, :1].detach().expand_as(problem.queries))
    outputs, _ = read(memorize, problem)
    moved = (outputs[0, 1:] - outputs[0, :-1]).flatten(1).norm(dim=-1) > 1e-9
    assert [t for t, change in enumerate(moved.tolist(), 1) if change] == [2, 5, 8]


def test_decayed_gradients_decay_since_the_anchor() -> None:
    """Of a matrix and c = 1: αW(I − η k kᵀ) + η v kᵀ, the published form of the gated delta rule."""
    spec = MemorySpec(network="matrix", gradient_at="decayed", key_width=3, chunk=CHUNK, limiter=False)
    problem = make_problem(spec, batch=1, count=COUNT, heads=1)
    weight = problem.initial["down"][0]
    outputs, _ = read(memorize_reference, problem)
    for t in range(COUNT):
        alpha, eta = problem.gates.retention[0, t, 0], problem.gates.step[0, t, 0]
        key, value = problem.keys[0, t, 0], problem.values[0, t, 0]
        erase = torch.eye(3, dtype=torch.float64) - eta * torch.outer(key, key)
        weight = alpha * weight @ erase + eta * torch.outer(value, key)
        assert_close(outputs[0, t, 0], weight @ problem.queries[0, t, 0], f"token {t}")


def test_capped_writes_bound_one_tokens_gradient() -> None:
    """∇ · min(1, ρ/‖∇‖): a token with a huge value moves the weights by η ρ and no more."""
    spec = MemorySpec(network="mlp", key_width=3, expansion=2, chunk=1, write_cap=0.5, retention="one", limiter=False)
    problem = make_problem(spec, batch=1, count=1, heads=1)
    loud = problem.replace(values=problem.values.detach() * 1e6)
    _, state = read(memorize_reference, loud)
    moves = [state.tensors[f"weights.{site}"][0] - problem.initial[site] for site in spec.fast]
    moved = torch.cat([move.flatten() for move in moves]).norm()
    assert_close(moved, 0.5 * problem.gates.step[0, 0, 0], "move")


def test_surprise_weighs_retention() -> None:
    """α^(2s/(s + scale)): of an expected token nothing is forgotten, of an unexpected one up to α²."""
    spec = MemorySpec(network="matrix", surprise_retention=2.0, key_width=3, chunk=1, limiter=False)
    problem = make_problem(spec, batch=1, count=1, heads=1).with_gates_inside()
    key, weight = problem.keys[0, 0, 0].detach(), problem.initial["down"][0].detach()
    alpha, eta = problem.gates.retention[0, 0, 0].detach(), problem.gates.step[0, 0, 0].detach()
    for value, name in ((weight @ key, "expected"), (problem.values[0, 0, 0].detach(), "surprising")):
        gradient = torch.outer(weight @ key - value, key)
        surprise = gradient.norm()
        expected = alpha ** (2 * surprise / (surprise + 2.0)) * weight - eta * gradient
        _, state = read(memorize_reference, problem.replace(values=value[None, None, None]))
        assert_close(state.tensors["weights.down"][0, 0], expected, name)
