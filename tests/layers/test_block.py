"""Blocks of every mixer with every memory: cut, padded, packed and reordered, they give the same numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from atlas_memory.layers import MIXERS, Block
from tests.layers.support import DIM, KINDS, SEGMENT, assert_same_state, in_calls, small_block
from tests.layers.test_attention import definition
from tests.strategies import splits
from tests.support import CHUNK, SMALL, assert_close, gradients_of, tokens

COUNT = 2 * SEGMENT + 3
LENGTHS = [COUNT, SEGMENT, 0, CHUNK + 1]
kinds = pytest.mark.parametrize(("mixer", "preset"), KINDS)


@kinds
def test_token_by_token_with_gradients(mixer: str, preset: str) -> None:
    """And every parameter learns."""
    block, x = small_block(mixer, preset), tokens(2, SEGMENT + 3, DIM).requires_grad_()
    leaves = {"x": x, **dict(block.named_parameters())}
    (y, state), (expected, expected_state) = in_calls(block, x, range(1, x.shape[1])), block(x)
    assert_close(y, expected, "outputs")
    assert_same_state(state, expected_state)
    mix = torch.randn_like(y)
    gradients, expected_gradients = (gradients_of((out * mix).sum(), leaves) for out in (y, expected))
    for name in leaves:
        assert_close(gradients[name], expected_gradients[name], f"gradient of {name}")
        assert torch.isfinite(expected_gradients[name]).all(), name
        assert expected_gradients[name].any(), name


@pytest.mark.parametrize("mixer", MIXERS)
@settings(max_examples=6)
@given(places=splits(COUNT, most=4))
def test_split_anywhere(mixer: str, places: list[int]) -> None:
    block, x = small_block(mixer, "titans"), tokens(2, COUNT, DIM)
    (y, state), (expected, expected_state) = in_calls(block, x, places), block(x)
    assert_close(y, expected, "outputs")
    assert_same_state(state, expected_state)


@kinds
def test_changing_a_token_changes_nothing_before_it(mixer: str, preset: str) -> None:
    block, x = small_block(mixer, preset), tokens(1, COUNT, DIM)
    y, _ = block(x)
    for place in (0, 1, CHUNK, SEGMENT - 1, SEGMENT, COUNT - 1):
        other = x.clone()
        other[:, place] += 1
        changed, _ = block(other)
        assert_close(changed[:, :place], y[:, :place], f"before token {place}")
        assert not torch.allclose(changed[:, place], y[:, place])


@pytest.mark.parametrize("side", ["left", "right"])
@kinds
def test_padding_equals_separate_sequences(mixer: str, preset: str, side: str) -> None:
    """In a first call, and in a second one, in which the rows are at different places of their segments."""
    block, state, alone = small_block(mixer, preset), None, [None] * len(LENGTHS)
    for seed, lengths in enumerate([LENGTHS, LENGTHS[::-1]]):
        x, mask = tokens(len(lengths), COUNT, DIM, seed=seed), torch.zeros(len(lengths), COUNT)
        for row, n in enumerate(lengths):
            mask[row, slice(COUNT - n, None) if side == "left" else slice(0, n)] = 1
        y, state = block(x, state, mask=mask)
        for row in range(len(lengths)):
            expected, alone[row] = block(x[row : row + 1, mask[row] == 1], alone[row])
            assert_close(y[row : row + 1, mask[row] == 1], expected, f"row {row}")
            assert_same_state(state.select([row]), alone[row])


@pytest.mark.parametrize("bounds", [[0, 3, 3, SEGMENT + 4, COUNT], [0, 1, 2, 2, COUNT - 2, COUNT - 1, COUNT]])
@pytest.mark.parametrize("mixer", MIXERS)
def test_packing_equals_separate_sequences(mixer: str, bounds: list[int]) -> None:
    """Side by side, and in groups of like length."""
    block, x = small_block(mixer, "titans"), tokens(1, COUNT, DIM)
    y, state = block(x, cu_seqlens=bounds)
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        expected, expected_state = block(x[:, begin:end])
        assert_close(y[:, begin:end], expected, f"sequence {row}")
        assert_same_state(state.select([row]), expected_state)


@kinds
def test_rows_are_selected(mixer: str, preset: str) -> None:
    """Rows at different places, in another order, one of them twice."""
    block, x, more = small_block(mixer, preset), tokens(2, COUNT, DIM), tokens(3, 5, DIM, seed=1)
    mask = torch.ones(2, COUNT)
    mask[0, SEGMENT + 1 :] = 0
    _, state = block(x, mask=mask)
    y, after = block(more, state.select(torch.tensor([1, 0, 1])))
    for row, source in enumerate([1, 0, 1]):
        expected, expected_after = block(more[row : row + 1], state.select([source]))
        assert_close(y[row : row + 1], expected, f"row {row}")
        assert_same_state(after.select([row]), expected_after)


@pytest.mark.parametrize("mixer", MIXERS)
def test_verbs_of_the_state(mixer: str) -> None:
    block, x = small_block(mixer, "titans"), tokens(2, COUNT, DIM)
    _, state = block(x)
    assert state.position == (COUNT, COUNT)
    assert state.batch == 2
    assert state.nbytes == sum(tensor.numel() * 8 for tensor in state.tensors()) > 0
    assert any(tensor.requires_grad for tensor in state.tensors())
    assert not any(tensor.requires_grad for tensor in state.detach().tensors())
    assert {tensor.dtype for tensor in state.to(torch.float32).tensors()} == {torch.float32}
    assert_same_state(state.clone(), state)


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "full_attention"])
def test_state_size_is_constant(mixer: str) -> None:
    block, state = small_block(mixer, "titans"), None
    sizes = set()
    for count in (1, CHUNK, 40, SEGMENT):
        _, state = block(tokens(1, count, DIM), state)
        sizes.add(state.nbytes)
    assert len(sizes) == 1


def test_reading_nothing() -> None:
    for mixer in MIXERS:
        block = small_block(mixer, "titans")
        _, state = block(tokens(2, 5, DIM))
        y, after = block(tokens(2, 0, DIM), state)
        assert y.shape == (2, 0, DIM)
        assert_same_state(after, state)


# The backbones, written out once, plainly.


def test_memory_as_layer() -> None:
    block, x = small_block("mal", "titans"), tokens(2, COUNT, DIM)
    remembered = block.memory(block.norm(x))[0]
    attended = definition(block.attention, block.between(x + remembered))
    assert_close(block(x)[0], _rest(block, x, remembered + attended), "outputs")


def test_memory_as_gate() -> None:
    block, x = small_block("mag", "titans"), tokens(2, COUNT, DIM)
    remembered, attended = block.memory(block.norm(x))[0], definition(block.attention, block.norm(x))
    gate = torch.sigmoid(block.union.remembered(remembered))
    assert_close(block(x)[0], _rest(block, x, block.union.attended(attended) * gate), "outputs")


@pytest.mark.parametrize("preset", ["titans", "gated_deltanet", "atlas"])
def test_memory_as_context(preset: str) -> None:
    """Segment by segment: ask the memory as it was, attend to the answers and the segment, memorise, gate."""
    block, x = small_block("mac", preset), tokens(2, COUNT, DIM)
    normed, updates = block.norm(x), []
    _, state = block.memory(normed[:, :0])
    for segment in normed.split(SEGMENT, dim=1):
        answers = block.memory.recall(segment, state)
        attended = definition(block.attention, segment, answers)
        remembered, state = block.memory(attended, state)
        updates.append(block.union.attended(attended) * torch.sigmoid(block.union.remembered(remembered)))
    y, after = block(x)
    assert_close(y, _rest(block, x, torch.cat(updates, dim=1)), "outputs")
    assert_same_state(after.parts["memory"], state)


def _rest(block: Block, x: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    x = x + update
    gate, up = block.feed_forward.gate_up(block.feed_forward_norm(x)).chunk(2, dim=-1)
    return x + block.feed_forward.down(torch.nn.functional.silu(gate) * up)


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mixer": "mix"}, "mixer='mix' is unknown; known: lmm, mal, mag, mac"),
        ({"mixer": "mac", "segment": 10, "preset": "titans", "memory": SMALL}, "segment=10 must be a multiple of"),
        ({"preset": "atals"}, "preset='atals' is unknown"),
        ({"window": 0}, "window=0"),
        ({"mixer": "memory_tokens", "segment": 0}, "segment=0 must be a whole number"),
        ({"mixer": "memory_tokens", "depth": 0}, "depth=0 must be a whole number"),
        ({"mixer": "memory_tokens", "tokens": 0}, "tokens=0 must be a whole number"),
        ({"inner": -1}, "inner=-1 must be a whole number"),
        ({"eps": -1.0}, "eps=-1.0 must be positive"),
    ],
)
def test_bad_construction_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Block(**{"dim": 8, "inner": 8, "heads": 2, **arguments})


@pytest.mark.parametrize("x", [[1, 2], torch.zeros(2, 5, DIM + 1), torch.zeros(5, DIM)])
def test_bad_input_is_named(x: Any) -> None:
    with pytest.raises(ValueError, match=f"x must be a tensor of shape .*{DIM}"):
        small_block("mag", "titans")(x)


def test_states_of_other_blocks_are_named() -> None:
    x = tokens(2, 5, DIM)
    block = small_block("mag", "titans")
    for other, named in [
        (small_block("lmm", "titans"), r"state has parts \['memory'\]"),
        (small_block("mag", "ttt"), "state belongs to another memory; fields differ: optimizer"),
    ]:
        with pytest.raises(ValueError, match=named):
            block(x, other(x)[1])
    with pytest.raises(ValueError, match="state must be a BlockState"):
        block(x, block(x)[1].parts)
