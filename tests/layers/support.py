"""Small blocks, ways to run them, and comparisons of their states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from atlas_memory.layers import MIXERS, AttentionState, Block, BlockState
from atlas_memory.spec import presets
from tests.support import CHUNK, SMALL, assert_close, assert_states_close

DIM = 8
WINDOW = 5
SEGMENT = 2 * CHUNK

# Every way a memory and attention can share a block, with every memory; and attention alone.
KINDS = [(mixer, preset) for mixer, row in MIXERS.items() if row.memory for preset in presets.names()]
KINDS += [(mixer, "atlas") for mixer, row in MIXERS.items() if not row.memory]


def small_block(mixer: str, preset: str = "atlas", persistent: int = 1, **options: Any) -> Block:
    """The same one for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        block = Block(
            DIM,
            mixer,
            inner=8,
            heads=2,
            window=WINDOW,
            segment=SEGMENT,
            persistent=persistent,
            preset=preset,
            memory_heads=2,
            memory=SMALL,
            **options,
        )
    return block.double()


def in_calls(layer: Callable[..., Any], x: Tensor, places: Sequence[int]) -> tuple[Tensor, Any]:
    """Read x in several calls, cut at `places`."""
    state, outputs = None, []
    for begin, end in itertools.pairwise([0, *places, x.shape[1]]):
        y, state = layer(x[:, begin:end], state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def visible(state: AttentionState) -> AttentionState:
    """Without what rows keep but can no longer see."""
    size = state.keys.shape[1]
    seen = torch.arange(size) >= size - torch.tensor(state.position)[:, None]
    return state.map(lambda tensor: tensor * seen[:, :, None, None, None])


def assert_same_state(actual: Any, expected: Any) -> None:
    if isinstance(expected, BlockState):
        assert list(actual.parts) == list(expected.parts)
        for name, part in expected.parts.items():
            assert_same_state(actual.parts[name], part)
    elif isinstance(expected, AttentionState):
        assert actual.position == expected.position
        actual, expected = visible(actual), visible(expected)
        size = expected.keys.shape[1]  # a growing cache of several rows is as long as its longest
        assert_close(actual.keys[:, actual.keys.shape[1] - size :], expected.keys, "keys")
        assert_close(actual.values[:, actual.values.shape[1] - size :], expected.values, "values")
    else:
        assert_states_close(actual, expected)
