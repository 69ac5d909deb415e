"""Attention equals its definition, however the calls are cut, padded or packed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from atlas_memory.layers import Attention, attention
from tests.layers.support import DIM, assert_same_state, in_calls
from tests.strategies import splits
from tests.support import assert_close, gradients_of, tokens

COUNT = 13
SHAPES = [(None, 0), (None, 2), (1, 0), (3, 0), (4, 2), (20, 1)]
shapes = pytest.mark.parametrize(("window", "persistent"), SHAPES)


def make(window: int | None, persistent: int = 0, **options: Any) -> Attention:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Attention(DIM, 2, window, persistent=persistent, **options).double()


def definition(layer: Attention, x: Tensor, beside: Tensor | None = None) -> Tensor:
    """Token by token, with absolute rotary positions, as complex numbers."""
    heads, width = layer.heads, layer.width
    frequencies = layer.theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = torch.polar(torch.ones(()).double(), torch.arange(x.shape[1])[:, None] * frequencies)[:, None]

    def rotated(y: Tensor) -> Tensor:
        first, second = y.chunk(2, dim=-1)
        turned = torch.complex(first, second) * turns
        return torch.cat([turned.real, turned.imag], dim=-1)

    def split(y: Tensor) -> Tensor:
        return y.unflatten(-1, (heads, width))

    queries = split(layer.query(x))
    sources = [tuple(split(part) for part in layer.key_value(y).chunk(2, -1)) for y in (beside, x) if y is not None]
    answers = []
    for t in range(x.shape[1]):
        start = 0 if layer.window is None else max(0, t - layer.window + 1)
        scores, values = [], []
        if layer.persistent is not None:
            scores.append(torch.einsum("bhd,phd->bhp", queries[:, t], layer.persistent[0]))
            values.append(layer.persistent[1].expand(x.shape[0], -1, -1, -1))
        for keys, contents in sources:
            place = slice(start, t + 1)
            scores.append(torch.einsum("bhd,bnhd->bhn", rotated(queries)[:, t], rotated(keys)[:, place]))
            values.append(contents[:, place])
        weights = (torch.cat(scores, dim=-1) / width**0.5).softmax(-1)
        answers.append(torch.einsum("bhn,bnhd->bhd", weights, torch.cat(values, dim=1)))
    return layer.output(torch.stack(answers, dim=1).flatten(-2))


@shapes
@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("count", [1, 3, COUNT])
def test_definition(window: int | None, persistent: int, sources: int, count: int) -> None:
    layer = make(window, persistent, sources=sources)
    x, beside = tokens(2, count, DIM), tokens(2, count, DIM, seed=1) if sources == 2 else None
    y, _ = layer(x, beside=beside)
    assert_close(y, definition(layer, x, beside), "outputs")


def test_queries_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", 4)
    layer, x = make(None, 1), tokens(2, COUNT, DIM)
    assert_close(layer(x)[0], definition(layer, x), "outputs")


def test_a_last_block_of_one_query_sees_its_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", 4)
    layer, x = make(8), tokens(2, COUNT, DIM)
    y, _ = in_calls(layer, x, [COUNT - 5])  # five queries: a block of four, and one
    assert_close(y, layer(x)[0], "outputs")


@pytest.mark.parametrize(
    ("count", "options"), [(6, {}), (1, {"last": True}), (6, {"last": True, "mask": torch.ones(2, 6)})]
)
def test_tokens_that_would_be_seen_are_not_left_out(count: int, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unseen=5 needs last=True, a window that x fills"):
        make(4)(tokens(2, count, DIM), unseen=5, **options)


@shapes
@settings(max_examples=8)
@given(places=splits(COUNT, most=4))
def test_split_anywhere(window: int | None, persistent: int, places: list[int]) -> None:
    layer, x = make(window, persistent), tokens(2, COUNT, DIM)
    (y, state), (expected, expected_state) = in_calls(layer, x, places), layer(x)
    assert_close(y, expected, "outputs")
    assert_same_state(state, expected_state)


@shapes
def test_token_by_token_with_gradients(window: int | None, persistent: int) -> None:
    layer, x = make(window, persistent), tokens(2, COUNT, DIM).requires_grad_()
    leaves = {"x": x, **dict(layer.named_parameters())}
    ways = [in_calls(layer, x, range(1, COUNT)), layer(x)]
    gradients, expected = (gradients_of((y.square().sum() + state.keys.sum()), leaves) for y, state in ways)
    for name in leaves:
        assert_close(gradients[name], expected[name], f"gradient of {name}")
        assert expected[name].any() or window == 1, name  # one key: nothing to weigh


@pytest.mark.parametrize("side", ["left", "right"])
@shapes
def test_padding_equals_separate_sequences(window: int | None, persistent: int, side: str) -> None:
    """In a first call, and in a second one that goes on from rows of different lengths."""
    layer, state, alone = make(window, persistent), None, [None] * 4
    for seed, lengths in enumerate([[COUNT, 4, 1, 0], [2, 0, 7, COUNT]]):
        x, mask = tokens(4, COUNT, DIM, seed=seed), torch.zeros(4, COUNT)
        for row, n in enumerate(lengths):
            mask[row, slice(COUNT - n, None) if side == "left" else slice(0, n)] = 1
        y, state = layer(x, state, mask=mask)
        assert not y[mask == 0].any()
        for row in range(4):
            expected, alone[row] = layer(x[row : row + 1, mask[row] == 1], alone[row])
            assert_close(y[row : row + 1, mask[row] == 1], expected, f"row {row}")
            assert_same_state(state.select([row]), alone[row])


@shapes
def test_packing_equals_separate_sequences(window: int | None, persistent: int) -> None:
    layer, state, alone = make(window, persistent), None, [None] * 3
    for bounds in ([0, 6, 6, COUNT], [0, 1, 9, COUNT]):
        x = tokens(1, COUNT, DIM)
        y, state = layer(x, state, cu_seqlens=bounds)
        for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
            expected, alone[row] = layer(x[:, begin:end], alone[row])
            assert_close(y[:, begin:end], expected, f"sequence {row}")
            assert_same_state(state.select([row]), alone[row])


def test_causal() -> None:
    layer, x = make(4, 1), tokens(1, COUNT, DIM)
    y, _ = layer(x)
    for place in range(COUNT):
        other = x.clone()
        other[:, place] += 1
        changed, _ = layer(other)
        assert torch.equal(changed[:, :place], y[:, :place])
        assert not torch.allclose(changed[:, place], y[:, place])
        assert_close(changed[:, place + 4 :], y[:, place + 4 :], "after the window")


def test_state_of_a_window_has_one_size() -> None:
    layer = make(4)
    sizes = {in_calls(layer, tokens(2, n, DIM), [])[1].nbytes for n in (1, 3, 4, 50)}
    assert sizes == {2 * 2 * 3 * DIM * 8}
    _, state = layer(tokens(2, 50, DIM))
    assert state.keys.untyped_storage().nbytes() * 2 == state.nbytes  # not a view of the whole call


def test_state_of_full_attention_grows() -> None:
    layer = make(None)
    _, state = layer(tokens(2, 5, DIM))
    assert state.nbytes == 2 * 2 * 5 * DIM * 8
    _, state = layer(tokens(2, 3, DIM), state)
    assert state.nbytes == 2 * 2 * 8 * DIM * 8


@pytest.mark.parametrize("persistent", [0, 2])
def test_masks_do_not_grow_with_the_call(persistent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    largest, original = 0, F.scaled_dot_product_attention

    def watched(*arguments: Any, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        nonlocal largest
        largest = max(largest, 0 if attn_mask is None else attn_mask.numel())
        return original(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    layer = make(8, persistent)
    layer(tokens(1, 1000, DIM), layer(tokens(1, 3, DIM))[1])
    assert 0 < largest <= 8 * (16 + persistent)


def test_states_are_never_changed_in_place() -> None:
    layer, x = make(4), tokens(2, 6, DIM)
    _, state = layer(x)
    before = state.clone()
    first, second = layer(x, state)[0], layer(x, state)[0]
    assert torch.equal(first, second)
    assert torch.equal(state.keys, before.keys)


def test_verbs_of_the_state() -> None:
    layer, x = make(4), tokens(3, 6, DIM)
    _, state = layer(x)
    assert not state.detach().keys.requires_grad
    assert state.to(torch.float32).keys.dtype == torch.float32
    assert state.select([2, 0, 2]).position == (6, 6, 6)
    assert torch.equal(state.select(torch.tensor([-1])).values, state.values[2:])
    with pytest.raises(ValueError, match=r"rows=\[3\] must lie in a batch of 3"):
        state.select([3])


def test_place_in_the_stream_does_not_matter() -> None:
    """Positions are counted from nearby: a million tokens in, angles are what they were at the start."""
    layer, x = make(8).float(), tokens(1, 12, DIM, dtype=torch.float32)
    _, state = layer(x)
    late = dataclasses.replace(state, position=(1_000_012,))
    assert torch.equal(layer(x, late)[0], layer(x, state)[0])


BAD: dict[str, tuple[Callable[[Tensor], dict[str, Any]], str]] = {
    "width": (lambda x: {"x": x[..., :3]}, r"x must be 1 inputs of shape \(batch, tokens, 8\)"),
    "second source": (lambda x: {"x": x, "beside": x}, "x must be 1 inputs"),
    "state of another kind": (lambda x: {"x": x, "state": 3}, "state must be an AttentionState"),
    "rows": (lambda x: {"x": x, "state": make(4)(x[:1])[1]}, "state has 1 rows, but the input has 2"),
    "window": (lambda x: {"x": x, "state": make(5)(x)[1]}, "state has keys of shape"),
    "device": (lambda x: {"x": x, "state": make(4)(x)[1].to("meta")}, "state is on meta"),
    "mask": (lambda x: {"x": x, "mask": torch.ones(2, 3)}, "mask must have shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    change, named = BAD[name]
    with pytest.raises(ValueError, match=named):
        make(4)(**change(tokens(2, 6, DIM)))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dim": 0}, "dim=0"),
        ({"heads": 3}, "dim=8 must be an even multiple of heads=3"),
        ({"heads": 8}, "dim=8 must be an even multiple of heads=8"),
        ({"window": 0}, "window=0"),
        ({"persistent": -1}, "persistent=-1"),
        ({"theta": 0.0}, "theta=0.0"),
    ],
)
def test_bad_construction_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Attention(**{"dim": 8, "heads": 2, **arguments})
