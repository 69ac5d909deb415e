"""Rows of a batch in threads of their own, on a CPU.

Rows know nothing of one another. Cores that share every operation wait for the slowest of them at the end of each, and
leave what lies between operations to one; cores that have rows of their own never wait (docs/results.md, "Reading").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atlas_memory.layers.states import BlockState
from atlas_memory.models.cache import AtlasCache

if TYPE_CHECKING:
    from atlas_memory.models.modeling_atlas import AtlasModel

# Tokens below which a thread is not worth its while.
FEWEST_TOKENS = 1024


def read_side_by_side(model: AtlasModel, ids: Tensor, cache: AtlasCache) -> None:
    """Read ids (B, T) into the cache, without gradients."""
    threads = min(torch.get_num_threads(), ids.shape[0], ids.numel() // FEWEST_TOKENS)
    if threads < 2 or not _may_be_shared(model):
        _read(model, ids, cache)
        return
    groups = torch.arange(ids.shape[0]).tensor_split(threads)
    parts = [_rows(cache, group) for group in groups]
    _in_threads([_job(model, ids[group], part) for group, part in zip(groups, parts, strict=True)])
    joined = [BlockState.cat([_state(part, place) for part in parts]) for place in range(len(cache.layers))]
    cache.advance(joined, ids.shape[1])


def _may_be_shared(model: AtlasModel) -> bool:
    """Whether calls in several threads are as good as one: hooks, offloading among them, expect one at a time."""
    hooked = any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in model.modules())
    return model.device.type == "cpu" and not hooked and not torch.compiler.is_compiling()


def _rows(cache: AtlasCache, rows: Tensor) -> AtlasCache:
    part = cache.copy()
    part.batch_select_indices(rows)
    return part


def _state(cache: AtlasCache, place: int) -> BlockState:
    state = cache.layers[place].state
    assert state is not None
    return state


def _read(model: AtlasModel, ids: Tensor, cache: AtlasCache) -> None:
    model(input_ids=ids, past_key_values=cache, only_cache=True)


def _job(model: AtlasModel, ids: Tensor, cache: AtlasCache) -> Callable[[], None]:
    """For a thread, which knows nothing of the modes of the one that started it."""
    half, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast("cpu", dtype, enabled=half):
            _read(model, ids, cache)

    return run


def _in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    """Each in one thread of its own, which shares its operations with no other."""
    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(jobs), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for running in [pool.submit(job) for job in jobs]:
                running.result()
    finally:
        torch.set_num_threads(count)  # threads set it for themselves, and for those that are yet to come
