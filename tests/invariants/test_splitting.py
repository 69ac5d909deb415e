"""Where the calls are cut changes nothing: not at any place, not token by token, not through a file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from atlas_memory import Memory, MemoryState, presets
from tests.strategies import splits
from tests.support import (
    CHUNK,
    assert_close,
    assert_readings_same,
    assert_states_close,
    assert_states_identical,
    small_memory,
    tokens,
)

COUNT = 3 * CHUNK + 1


def _in_calls(memory: Memory, x: Tensor, places: Sequence[int]) -> tuple[Tensor, MemoryState]:
    state, outputs = None, []
    for begin, end in itertools.pairwise([0, *places, x.shape[1]]):
        y, state = memory(x[:, begin:end], state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("preset", presets.names())
@settings(max_examples=12)
@given(places=splits(COUNT, most=4))
def test_split_anywhere(preset: str, places: list[int]) -> None:
    memory, x = small_memory(preset), tokens(2, COUNT)
    (y, state), (expected, expected_state) = _in_calls(memory, x, places), memory(x)
    assert_close(y, expected, "outputs")
    assert_states_close(state, expected_state)


@pytest.mark.parametrize("preset", presets.names())
def test_token_by_token(preset: str) -> None:
    """With gradients: of every parameter and every input."""
    memory, x = small_memory(preset), tokens(2, COUNT).requires_grad_()
    leaves = {"x": x, **dict(memory.named_parameters())}
    results = [_in_calls(memory, x, list(range(1, COUNT))), memory(x)]
    assert_readings_same(*results, leaves)


@pytest.mark.parametrize("count", [CHUNK - 1, CHUNK, CHUNK + 2])
@pytest.mark.parametrize("preset", presets.names())
def test_through_a_file_bit_for_bit(preset: str, count: int, tmp_path: Path) -> None:
    memory, x, more = small_memory(preset, dtype=torch.float32), tokens(2, count), tokens(2, 7, seed=1)
    _, state = memory(x.float())
    state.save(tmp_path / "state")
    loaded = MemoryState.load(tmp_path / "state", memory.spec)
    assert_states_identical(loaded, state)
    (y, after), (expected, expected_after) = memory(more.float(), loaded), memory(more.float(), state)
    assert torch.equal(y, expected)
    assert_states_identical(after, expected_after)


@pytest.mark.parametrize("preset", presets.names())
def test_reading_nothing_changes_nothing(preset: str) -> None:
    memory = small_memory(preset)
    _, state = memory(tokens(2, CHUNK + 2))
    y, after = memory(tokens(2, 0), state)
    assert y.shape == (2, 0, 6)
    assert_states_identical(after, state)


@pytest.mark.parametrize("preset", presets.names())
def test_states_are_never_changed_in_place(preset: str) -> None:
    """One state may be read on from twice, and gives the same numbers each time."""
    memory, x = small_memory(preset), tokens(2, CHUNK + 3, seed=1)
    _, state = memory(tokens(2, CHUNK + 2))
    state = state.detach()
    before = state.clone()
    first, _ = memory(x, state)
    memory.recall(x, state)
    memory.reference(x, state)
    second, _ = memory(x, state)
    assert_states_identical(state, before)
    assert torch.equal(first, second)


@pytest.mark.parametrize("count", [CHUNK - 1, 3 * CHUNK])
@pytest.mark.parametrize("preset", presets.names())
def test_states_have_memory_of_their_own(preset: str, count: int) -> None:
    """Training changes parameters in place; and a view would keep alive all that was read in a call."""
    memory, x = small_memory(preset, convolution=1), tokens(2, count)
    _, state = memory(x)
    state = state.detach()
    before = state.clone()
    held = sum(tensor.untyped_storage().nbytes() for tensor in state.tensors.values())
    assert held <= 2 * state.nbytes  # a leaf may be the part of another chunk that was kept
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(1)
    x.zero_()
    assert_states_identical(state, before)


@pytest.mark.parametrize("preset", [name for name in presets.names() if not presets[name].kernel])
def test_state_size_is_constant(preset: str) -> None:
    """From the first token on, whatever the number of tokens and calls."""
    memory = small_memory(preset)
    _, state = memory(tokens(2, 1))
    shapes, size = {name: tensor.shape for name, tensor in state.tensors.items()}, state.nbytes
    for seed, count in enumerate([1, CHUNK, 2 * CHUNK + 1, 40]):
        _, state = memory(tokens(2, count, seed=seed), state)
        assert {name: tensor.shape for name, tensor in state.tensors.items()} == shapes
        assert state.nbytes == size
    assert state.tokens_seen.tolist() == [1 + 1 + CHUNK + 2 * CHUNK + 1 + 40] * 2


@pytest.mark.parametrize("preset", [name for name in presets.names() if presets[name].kernel])
def test_cache_grows_by_an_entry_a_token_up_to_the_horizon(preset: str) -> None:
    memory = small_memory(preset)
    horizon, state = memory.spec.horizon, None
    sizes = []
    for count in (CHUNK, CHUNK, 4 * CHUNK, 4 * CHUNK):
        _, state = memory(tokens(2, count), state)
        assert state.tensors["cache.keys"].shape[1] == max(state.cached)
        sizes.append(state.nbytes)
    assert state.cached == ((10 * CHUNK if horizon is None else horizon),) * 2
    assert sizes[0] < sizes[1]
    assert (sizes[2] == sizes[3]) == (horizon is not None)


@pytest.mark.parametrize("preset", presets.names())
@settings(max_examples=6)
@given(data=st.data())
def test_rows_may_pause(preset: str, data: st.DataObject) -> None:
    """Rows that get different numbers of tokens in every call, none at all among them, end as if alone."""
    memory, x = small_memory(preset), tokens(2, 2 * CHUNK + 1)
    state, done, parts = None, [0, 0], [[], []]
    for _ in range(3):
        counts = [data.draw(st.integers(0, x.shape[1] - n)) for n in done]
        width = max(*counts, 1)
        call, mask = torch.zeros(2, width, 6, dtype=torch.float64), torch.zeros(2, width)
        for row, n in enumerate(counts):
            call[row, :n], mask[row, :n] = x[row, done[row] : done[row] + n], 1
        y, state = memory(call, state, mask=mask)
        for row, n in enumerate(counts):
            parts[row].append(y[row, :n])
        done = [before + n for before, n in zip(done, counts, strict=True)]
    for row, n in enumerate(done):
        expected, expected_state = memory(x[row : row + 1, :n])
        assert_close(torch.cat(parts[row]), expected[0], "outputs")
        assert_states_close(state.select([row]), expected_state)
