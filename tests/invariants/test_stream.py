"""Reading without end: the state stays as large as it was, and finite."""

from __future__ import annotations

import pytest
import torch

from atlas_memory import MemoryState, presets
from tests.support import small_memory

DIM, CALL = 6, 1000
# one of each kind: exact dot, exact regression, exact with a window, deep with gd, with momentum, with Muon, gated
KINDS = ["linear_attention", "gated_deltanet", "swla", "ttt", "titans", "atlas", "atlas++"]


def _stream(preset: str, count: int) -> MemoryState:
    """Read noise in calls; returns the last state."""
    memory = small_memory(preset, DIM, dtype=torch.float32, chunk=50)
    generator, state, size = torch.Generator().manual_seed(0), None, None
    with torch.inference_mode():
        for _ in range(count // CALL):
            y, state = memory(torch.randn(1, CALL, DIM, generator=generator), state)
            size = size or state.nbytes
            assert state.nbytes == size
            assert torch.isfinite(y).all()
    assert state is not None
    return state


def _check(preset: str, count: int) -> None:
    state = _stream(preset, count)
    assert state.tokens_seen.tolist() == [count]
    for name, tensor in state.tensors.items():
        assert torch.isfinite(tensor).all(), name


@pytest.mark.parametrize("preset", KINDS)
def test_twenty_thousand_tokens(preset: str) -> None:
    _check(preset, 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets.names())
def test_a_million_tokens(preset: str) -> None:
    _check(preset, 1_000_000)
