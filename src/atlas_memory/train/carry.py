"""Carried states as files, one a rank: put together again, and shared out to any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from atlas_memory.layers import Block, BlockState
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


def save(cache: AtlasCache, path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for place, layer in enumerate(cache.layers):
        assert layer.state is not None
        layers.append(
            {"length": layer.length, "positions": {name: part.position for name, part in layer.state.parts.items()}}
        )
        for name, part in layer.state.parts.items():
            leaves = part.tensors if isinstance(part, MemoryState) else {"keys": part.keys, "values": part.values}
            tensors |= {f"{place}/{name}/{leaf}": tensor.cpu().contiguous() for leaf, tensor in leaves.items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"layers": json.dumps(layers)})


def load(path: Path, blocks: Iterable[Block], device: torch.device) -> AtlasCache:
    """What `save` wrote, for the blocks of the same model."""
    with safe_open(path, framework="pt") as file:
        layers = json.loads(file.metadata()["layers"])
        tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
    cache = AtlasCache(len(layers))
    for place, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        parts: dict[str, MemoryState | AttentionState] = {}
        for name, position in layer["positions"].items():
            start = f"{place}/{name}/"
            leaves = {key.removeprefix(start): x for key, x in tensors.items() if key.startswith(start)}
            parts[name] = (
                AttentionState(leaves["keys"], leaves["values"], tuple(position))
                if name == "attention"
                else MemoryState(block.memory.spec, leaves, tuple(position))
            )
        cache.layers[place].advance(BlockState(parts), layer["length"])
    return cache


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
