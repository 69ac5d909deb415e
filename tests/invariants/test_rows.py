"""What a token may not see: the future, and other rows; paddings and packings are only layouts."""

from __future__ import annotations

import itertools

import pytest
import torch

from atlas_memory import MemoryState, presets
from atlas_memory.ops import memorize
from tests.support import (
    CHUNK,
    assert_close,
    assert_states_close,
    make_problem,
    read,
    small_memory,
    small_spec,
    tokens,
)

COUNT = 2 * CHUNK + 3


@pytest.mark.parametrize("preset", presets.names())
def test_changing_a_token_changes_nothing_before_it(preset: str) -> None:
    """And does change what follows, in the token's own answer first of all."""
    memory, x = small_memory(preset), tokens(1, COUNT)
    y, _ = memory(x)
    for place in range(COUNT):
        other = x.clone()
        other[:, place] += 1
        changed, _ = memory(other)
        assert_close(changed[:, :place], y[:, :place], f"before token {place}")
        assert not torch.allclose(changed[:, place], y[:, place])


@pytest.mark.parametrize("preset", presets.names())
def test_gradients_do_not_reach_the_future(preset: str) -> None:
    """The operator's own inputs: no answer depends on later queries, keys, values or gates."""
    problem = make_problem(small_spec(preset), count=COUNT)
    outputs, _ = read(memorize, problem)
    place = CHUNK + 1
    per_token = {name: leaf for name, leaf in problem.leaves().items() if leaf.shape[:2] == (2, COUNT)}
    gradients = torch.autograd.grad(outputs[:, place].sum(), list(per_token.values()))
    for name, gradient in zip(per_token, gradients, strict=True):
        assert not gradient[:, place + 1 :].any(), name
        if name != "queries":
            assert gradient[:, : place + 1].any(), name
    assert not gradients[0][:, :place].any()  # each query is only its own


@pytest.mark.parametrize("preset", presets.names())
def test_rows_of_a_batch_never_touch(preset: str) -> None:
    memory, x = small_memory(preset), tokens(3, COUNT)
    x[1] *= 1e3
    y, state = memory(x)
    for row in range(3):
        expected, expected_state = memory(x[row : row + 1])
        assert_close(y[row : row + 1], expected, f"row {row}")
        assert_states_close(state.select([row]), expected_state)
    (gradient,) = torch.autograd.grad(memory(x.requires_grad_())[0][0].sum(), x)
    assert gradient[0].any()
    assert not gradient[1:].any()


LENGTHS = [COUNT, CHUNK, 1, 0, CHUNK + 2]
UNLIKE = [1, 2 * CHUNK + 3, 0, 2, 1, 3, 1]  # read in groups: side by side, most would be padding


def _padded(lengths: list[int], side: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Rows (B, T, dim) with noise at padding, their mask, and the rows alone."""
    x, mask = tokens(len(lengths), COUNT), torch.zeros(len(lengths), COUNT)
    alone = []
    for row, n in enumerate(lengths):
        start = {"left": COUNT - n, "right": 0, "both": (COUNT - n) // 2}[side]
        mask[row, start : start + n] = 1
        alone.append(x[row : row + 1, start : start + n])
    return x, mask, alone


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("preset", presets.names())
def test_padding_equals_separate_sequences(preset: str, side: str) -> None:
    """In a first call, and in a second one that goes on from there."""
    memory, state = small_memory(preset), None
    states: list[MemoryState | None] = [None] * len(LENGTHS)
    for lengths in (LENGTHS, LENGTHS[::-1]):
        x, mask, alone = _padded(lengths, side)
        y, state = memory(x, state, mask=mask)
        assert not y[mask == 0].any()
        for row, part in enumerate(alone):
            expected, states[row] = memory(part, states[row])
            assert_close(y[row][mask[row] == 1], expected[0], f"row {row}")
            assert_states_close(state.select([row]), states[row])


@pytest.mark.parametrize("preset", presets.names())
def test_padding_gets_no_gradient(preset: str) -> None:
    memory = small_memory(preset)
    x, mask, _ = _padded(LENGTHS, "left")
    x.requires_grad_()
    y, state = memory(x, mask=mask)
    loss = y.square().sum() + sum(tensor.square().sum() for tensor in state.tensors.values())
    (gradient,) = torch.autograd.grad(loss, x)
    assert not gradient[mask == 0].any()
    assert gradient[mask == 1].any(dim=-1).all()


@pytest.mark.parametrize("counts", [LENGTHS, UNLIKE], ids=["like", "unlike"])
@pytest.mark.parametrize("preset", presets.names())
def test_packing_equals_separate_sequences(preset: str, counts: list[int]) -> None:
    """One row of many sequences; the state has a row for each, and goes on from there."""
    memory, state = small_memory(preset), None
    states: list[MemoryState | None] = [None] * len(counts)
    for seed, lengths in enumerate((counts, counts[::-1])):
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        x = tokens(1, bounds[-1], seed=seed)
        y, state = memory(x, state, cu_seqlens=torch.tensor(bounds))
        assert state.batch == len(lengths)
        for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
            expected, states[row] = memory(x[:, begin:end], states[row])
            assert_close(y[:, begin:end], expected, f"sequence {row}")
            assert_states_close(state.select([row]), states[row])
