"""An AtlasCache on disk: everything a model needs to go on reading, in one safetensors file, bit for bit."""

from __future__ import annotations

import json
import os
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save as serialise
from torch import Tensor

from atlas_memory.files import read_tensors, write_whole
from atlas_memory.layers.states import AttentionState, BlockState
from atlas_memory.models.cache import AtlasCache
from atlas_memory.ops import MemoryState
from atlas_memory.spec import MemorySpec

FORMAT = "atlas-memory-cache"


def save_cache(cache: AtlasCache, path: str | os.PathLike[str], notes: dict[str, Any] | None = None) -> None:
    """Write a cache, with notes that JSON can hold: complete, or not at all."""
    tensors: dict[str, Tensor] = {}
    layers = []
    for number, layer in enumerate(cache.layers):
        parts = {} if layer.state is None else layer.state.parts
        described = {}
        for name, part in parts.items():
            leaves = part.tensors if isinstance(part, MemoryState) else {"keys": part.keys, "values": part.values}
            tensors |= {
                f"{number}.{name}.{leaf}": x.detach().to("cpu", copy=True).contiguous() for leaf, x in leaves.items()
            }
            spec = part.spec.to_dict() if isinstance(part, MemoryState) else None
            described[name] = {"position": part.position, "spec": spec}
        layers.append({"length": layer.length, "parts": described})
    metadata = {"format": FORMAT, "layers": json.dumps(layers), "notes": json.dumps(notes or {})}
    write_whole(path, serialise(tensors, metadata))


def load_cache(path: str | os.PathLike[str]) -> tuple[AtlasCache, dict[str, Any]]:
    """What `save_cache` wrote: the cache and the notes."""
    try:
        metadata, tensors = read_tensors(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"path={str(path)!r} is not a whole safetensors file: {error}.") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"path={str(path)!r} is a safetensors file, but not a saved cache.")
    try:
        return _cache_of(json.loads(metadata["layers"]), tensors), json.loads(metadata["notes"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"path={str(path)!r} is a damaged cache: {type(error).__name__} {error}.") from error


def _cache_of(layers: Any, tensors: dict[str, Tensor]) -> AtlasCache:
    cache = AtlasCache(len(layers))
    for number, layer in enumerate(layers):
        parts: dict[str, MemoryState | AttentionState] = {}
        for name, part in layer["parts"].items():
            start = f"{number}.{name}."
            leaves = {key.removeprefix(start): x for key, x in tensors.items() if key.startswith(start)}
            position = tuple(part["position"])
            if part["spec"] is None:
                parts[name] = AttentionState(leaves["keys"], leaves["values"], position)
            else:
                parts[name] = MemoryState(MemorySpec.from_dict(part["spec"]), leaves, position)
        if parts:
            cache.layers[number].advance(BlockState(parts), layer["length"])
    return cache
