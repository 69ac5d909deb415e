"""AtlasCache: what `past_key_values` carries: the state of every block, in the interface of transformers' caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from atlas_memory.layers.states import BlockState


class AtlasCacheLayer(CacheLayerMixin):
    """The state of one block. The state itself is never changed in place; the layer points to the newest one."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: BlockState | None = None
        self.length = 0  # columns of the batch read so far, padding among them: what `generate` counts

    def advance(self, state: BlockState, columns: int) -> None:
        self.state, self.length, self.is_initialized = state, self.length + columns, True

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1  # no maximum

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    @property
    def batch_size(self) -> int:
        if self.state is None:
            raise AttributeError("nothing was read yet")  # transformers asks by hasattr
        return self.state.batch

    def reset(self) -> None:
        self.state, self.length, self.is_initialized = None, 0, False

    def change(self, function: Callable[[BlockState], BlockState]) -> None:
        if self.state is not None:
            self.state = function(self.state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change(lambda state: state.select(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda state: state.select([row for row in range(state.batch) for _ in range(repeats)]))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"crop({tokens_to_remove}): a memory cannot unread tokens. Keep cache.copy() from before them instead."
            )

    def offload(self) -> None:
        if self.state is not None:
            self.device = next(iter(self.state.tensors())).device
            self.state = self.state.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        if self.state is not None and hasattr(self, "device"):
            self.state = self.state.to(self.device, non_blocking=True)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        raise NotImplementedError("an AtlasCacheLayer is filled by the model's own layers, not with keys and values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        self.lazy_initialization(key_states, value_states)


class AtlasCache(Cache):
    """The states of all blocks of a model; what a model returns as `past_key_values`, and goes on from."""

    layers: list[AtlasCacheLayer]  # type: ignore[assignment]  # of one kind, where the base class allows any

    def __init__(self, num_hidden_layers: int) -> None:
        super().__init__(layers=[AtlasCacheLayer() for _ in range(num_hidden_layers)])

    def advance(self, states: Sequence[BlockState], columns: int) -> None:
        """Go on to these states of the layers, `columns` further."""
        for layer, state in zip(self.layers, states, strict=True):
            layer.advance(state, columns)

    @property
    def nbytes(self) -> int:
        return sum(layer.state.nbytes for layer in self.layers if layer.state is not None)

    @property
    def tokens_seen(self) -> Tensor:
        """(B,) real tokens read by each row."""
        state = self.layers[0].state
        return torch.tensor(() if state is None else state.position, dtype=torch.long)

    def copy(self) -> AtlasCache:
        """Another cache with the same states: reading on from one leaves the other where it is. Copies no tensor."""
        other = AtlasCache(len(self.layers))
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if mine.state is not None:
                theirs.advance(mine.state, mine.length)
        return other

    def detach(self) -> AtlasCache:
        """A copy that gradients do not pass."""
        other = self.copy()
        for layer in other.layers:
            layer.change(BlockState.detach)
        return other

    def to(self, device: torch.device | str) -> AtlasCache:
        """A copy on this device."""
        other = self.copy()
        for layer in other.layers:
            layer.change(lambda state: state.to(device))
        return other

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        host = indices.to("cpu")  # once, not once per layer
        for layer in self.layers:
            layer.batch_select_indices(host)
