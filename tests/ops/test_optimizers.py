"""Coefficients against the recurrences they unroll. Gradients are scalars here: the algebra is the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from atlas_memory.ops import Gates
from atlas_memory.ops.optimizers import (
    anchor_decay,
    decay_matrix,
    linear_coefficients,
    muon_coefficients,
    window_bands,
)

TOKENS, WINDOW = 6, 3
COLUMNS = TOKENS + WINDOW - 1
LIKE = torch.zeros(TOKENS, 1, dtype=torch.float64)


def _gate(*shape: int) -> Tensor:
    """With exact zeros and ones."""
    return (torch.rand(*shape, dtype=torch.float64) * 2 - 0.5).clamp(0, 1)


def _gates(momentum: bool) -> Gates:
    return Gates(_gate(TOKENS), _gate(TOKENS) if momentum else None, _gate(TOKENS), _gate(TOKENS, WINDOW))


def _windowed(gates: Gates, gradients: Tensor, t: int) -> Tensor:
    """Σ_j γ_tj ∇_{t−j}; the first WINDOW − 1 gradients lie before the chunk."""
    return sum(gates.window[t, j] * gradients[WINDOW - 1 + t - j] for j in range(WINDOW))


@pytest.mark.parametrize("momentum", [False, True])
def test_linear_coefficients_unroll_the_recurrence(momentum: bool) -> None:
    gates, gradients = _gates(momentum), torch.randn(COLUMNS, dtype=torch.float64)
    coefficients = linear_coefficients(gates, LIKE, COLUMNS)
    start_weight, start_momentum = 1.7, 0.6 if momentum else 0.0
    weight, carried = torch.tensor(start_weight).double(), torch.tensor(start_momentum).double()
    for t in range(TOKENS):
        carried = (gates.momentum[t] * carried if momentum else 0) + gates.step[t] * _windowed(gates, gradients, t)
        weight = gates.retention[t] * weight - carried
        unrolled = coefficients.weight[t] * start_weight - coefficients.writes[t] @ gradients
        if momentum:
            unrolled = unrolled - coefficients.crossing[t] * start_momentum
            gathered = coefficients.momentum[t] * start_momentum + coefficients.gathers[t] @ gradients
            torch.testing.assert_close(gathered, carried)
        torch.testing.assert_close(unrolled, weight)


@pytest.mark.parametrize("interval", [1, 2, 4, TOKENS, TOKENS + 5])
@pytest.mark.parametrize("phase", [0, 1])
def test_muon_coefficients_unroll_the_recurrence(interval: int, phase: int) -> None:
    """With a step of sign(S) in the place of Newton–Schulz: any function of S has the same coefficients."""
    gates, gradients = _gates(momentum=True), torch.randn(COLUMNS, dtype=torch.float64)
    points = range((interval - 1 - phase) % interval, TOKENS, interval)
    start_pending = torch.tensor(0.4, dtype=torch.float64)
    coefficients = muon_coefficients(gates, start_pending, points, LIKE, COLUMNS)
    weight, carried, pending = torch.tensor(1.7).double(), torch.tensor(0.6).double(), start_pending
    steps, since = [], torch.ones((), dtype=torch.float64)
    for t in range(TOKENS):
        carried = gates.momentum[t] * carried + _windowed(gates, gradients, t)
        pending = gates.retention[t] * pending + gates.step[t]
        weight, since = gates.retention[t] * weight, gates.retention[t] * since
        if t in points:
            steps.append(carried.sign())
            weight, pending, since = weight - pending * steps[-1], torch.zeros_like(pending), torch.ones_like(since)
        unrolled = coefficients.weight[t] * 1.7 - _inner(coefficients.updates[t, : len(steps)], steps)
        torch.testing.assert_close(unrolled, weight)
        torch.testing.assert_close(coefficients.updates[t, len(steps) :].sum(), torch.zeros_like(weight))
        torch.testing.assert_close(coefficients.momentum[t] * 0.6 + coefficients.gathers[t] @ gradients, carried)
        torch.testing.assert_close(coefficients.pending[t], pending)
        torch.testing.assert_close(coefficients.since[t], since)


def _inner(coefficients: Tensor, steps: Sequence[Tensor]) -> Tensor:
    return coefficients @ torch.stack(list(steps)) if steps else coefficients.sum()


def test_decay_matrix_is_the_product_between_two_tokens() -> None:
    gate = _gate(TOKENS)
    expected = torch.tensor(
        [[float(gate[s + 1 : t + 1].prod()) if s <= t else 0.0 for s in range(TOKENS)] for t in range(TOKENS)]
    ).double()
    torch.testing.assert_close(decay_matrix(gate, LIKE), expected)
    torch.testing.assert_close(anchor_decay(gate, decay_matrix(gate, LIKE), LIKE), gate.cumprod(0))


@pytest.mark.parametrize("zeros", [[], [0], [2], [1, 4], list(range(TOKENS))])
def test_gradient_of_the_decay_matrix_is_exact_at_zero(zeros: list[int]) -> None:
    gate = torch.rand(2, TOKENS, dtype=torch.float64)
    gate[:, zeros] = 0
    assert torch.autograd.gradcheck(lambda g: decay_matrix(g, LIKE.expand(2, -1, -1)), (gate.requires_grad_(),))


def test_absent_gates_are_constants() -> None:
    """None is 1 for retention, step and window: the same coefficients as gates of ones."""
    ones = torch.ones(TOKENS, dtype=torch.float64)
    given = Gates(ones, None, ones, torch.ones(TOKENS, WINDOW, dtype=torch.float64))
    for absent, present in zip(
        linear_coefficients(Gates(), LIKE, COLUMNS), linear_coefficients(given, LIKE, COLUMNS), strict=True
    ):
        if present is not None:
            torch.testing.assert_close(absent.expand_as(present), present)


def test_window_bands() -> None:
    window = torch.arange(1, 7, dtype=torch.float64).reshape(2, 3)  # two tokens, offsets 0, 1, 2
    bands = window_bands(Gates(window=window), torch.zeros(2, 1, dtype=torch.float64), 4)
    assert bands.tolist() == [[3, 2, 1, 0], [0, 6, 5, 4]]
