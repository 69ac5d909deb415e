"""Carried states of all ranks: put together, and shared out to any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atlas_memory.layers import BlockState
from atlas_memory.layers.states import AttentionState
from atlas_memory.models import AtlasCache
from atlas_memory.ops import MemoryState


def join(caches: Sequence[AtlasCache]) -> AtlasCache:
    """Rows of several caches, one below the other."""
    joined = AtlasCache(len(caches[0].layers))
    for layers in zip(joined.layers, *(cache.layers for cache in caches), strict=True):
        states = [layer.state for layer in layers[1:] if layer.state is not None]
        parts = {name: _join_parts([state.parts[name] for state in states]) for name in states[0].parts}
        layers[0].advance(BlockState(parts), max(layer.length for layer in layers[1:]))
    return joined


def share(cache: AtlasCache, rows: Sequence[int]) -> AtlasCache:
    """A cache of these rows."""
    chosen = cache.copy()
    chosen.batch_select_indices(torch.tensor(rows))
    return chosen


def _join_parts(parts: Sequence[MemoryState | AttentionState]) -> MemoryState | AttentionState:
    memories = [part for part in parts if isinstance(part, MemoryState)]
    if memories:
        return MemoryState.cat(memories)
    attentions = [part for part in parts if isinstance(part, AttentionState)]
    places = max(part.keys.shape[1] for part in attentions)

    def padded(tensor: Tensor) -> Tensor:
        missing = places - tensor.shape[1]  # right-aligned, zeros before
        return torch.cat([tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:]), tensor], dim=1)

    return AttentionState(
        torch.cat([padded(part.keys) for part in attentions]),
        torch.cat([padded(part.values) for part in attentions]),
        tuple(n for part in attentions for n in part.position),
    )
