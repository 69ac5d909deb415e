"""Our Muon moves as PyTorch's does, up to the rounding of bfloat16, and shares its state."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from atlas_memory.train import muon
from atlas_memory.train.muon import Muon

SHAPES = [(6, 8), (6, 8), (8, 6), (5, 5), (6, 8), (3, 20)]
SETTINGS = {"lr": 0.02, "momentum": 0.9}


def parameters(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def learn(optimizer: torch.optim.Optimizer, matrices: Iterable[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    optimizer.step()


def theirs(matrices: list[nn.Parameter], weight_decay: float = 0.1) -> torch.optim.Muon:
    groups = [{"params": matrices, "weight_decay": weight_decay}]
    return torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw", **SETTINGS)


def ours(matrices: list[nn.Parameter], weight_decay: float = 0.1) -> Muon:
    return Muon([{"params": matrices, "weight_decay": weight_decay}], **SETTINGS)


def by_singular_values(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, floor: float) -> Tensor:
    """The same polynomials of the singular values, in place of PyTorch's products of bfloat16."""
    a, b, c = coefficients
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / (1.01 * torch.linalg.norm(values) + floor)
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return (left * values @ right).to(matrix)


@torch.no_grad()
def difference(ones: list[nn.Parameter], others: list[nn.Parameter]) -> float:
    """The largest, relative to how far a matrix has moved."""
    return max(
        float(torch.linalg.norm(one - other) / torch.linalg.norm(one - start))
        for one, other, start in zip(ones, others, parameters(), strict=True)
    )


@pytest.mark.parametrize("entries", [1 << 25, 100, 1])  # matrices moved at once: all, two, one
@pytest.mark.parametrize(("exact", "tolerance"), [(True, 1e-5), (False, 0.05)])
def test_moves_as_pytorch(monkeypatch: pytest.MonkeyPatch, entries: int, exact: bool, tolerance: float) -> None:
    monkeypatch.setattr(muon, "_ENTRIES", entries)
    if exact:
        monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", by_singular_values)
    first, second = parameters(), parameters()
    optimizers = theirs(first), ours(second)
    for seed in range(1, 5):
        for optimizer, matrices in zip(optimizers, (first, second), strict=True):
            learn(optimizer, matrices, seed)
        assert difference(first, second) < tolerance


def test_state_is_that_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", by_singular_values)
    first, second = parameters(), parameters()
    before, after = theirs(first), ours(second)
    learn(before, first, seed=1)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for matrix, other in zip(first, second, strict=True):
        other.data.copy_(matrix.data)
    learn(before, first, seed=2)
    learn(after, second, seed=2)
    assert difference(first, second) < 1e-5


def test_what_has_no_gradient_stays() -> None:
    matrices = parameters()
    optimizer = ours(matrices)
    learn(optimizer, matrices[::2], seed=1)
    for place, (matrix, start) in enumerate(zip(matrices, parameters(), strict=True)):
        assert torch.equal(matrix, start) == (place % 2 == 1)
