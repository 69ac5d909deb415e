"""Rows of a batch in threads of their own, on a CPU.

Rows know nothing of one another. Cores that share every operation wait for the slowest of them at the end of each, and
leave what lies between operations to one; cores that have rows of their own, and go on with them from piece to piece,
never wait (docs/results.md, "Reading").
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atlas_memory.layers.states import BlockState
from atlas_memory.models.cache import AtlasCache
from atlas_memory.models.inputs import check_cache

if TYPE_CHECKING:
    from atlas_memory.models.modeling_atlas import AtlasModel

# Tokens of a piece below which a thread is not worth its while.
FEWEST_TOKENS = 1024
# Pieces that wait for a thread while it reads: enough for it not to wait for them, few enough to be held.
AHEAD = 2


def read_side_by_side(model: AtlasModel, pieces: Iterable[Tensor], cache: AtlasCache) -> None:
    """Read pieces of ids (B, T), one after another, into the cache, without gradients.

    After an error the cache stands at the end of a piece; where rows have threads of their own, where it stood before.
    """
    pieces = iter(pieces)
    for first in pieces:
        threads = min(torch.get_num_threads(), first.shape[0], first.numel() // FEWEST_TOKENS)
        if threads > 1 and _may_be_shared(model):
            _read_in_threads(model, itertools.chain([first], pieces), cache, first.shape[0], threads)
        else:
            _read(model, first, cache)


def _read_in_threads(model: AtlasModel, pieces: Iterator[Tensor], cache: AtlasCache, rows: int, threads: int) -> None:
    check_cache(cache, model.blocks)
    kept = {layer.state.batch for layer in cache.layers if layer.state is not None} - {rows}
    if kept:
        raise ValueError(f"past_key_values has {kept.pop()} rows, but the tokens have {rows}.")
    groups = torch.arange(rows).tensor_split(threads)
    parts = [_rows(cache, group) for group in groups]
    steps = ([_job(model, ids[group], part) for group, part in zip(groups, parts, strict=True)] for ids in pieces)
    _in_lanes(steps, threads)
    joined = [BlockState.cat([_state(part, place) for part in parts]) for place in range(len(cache.layers))]
    cache.advance(joined, parts[0].get_seq_length() - cache.get_seq_length())


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
    model(input_ids=ids.to(model.embed_tokens.weight.device), past_key_values=cache, only_cache=True)


def _job(model: AtlasModel, ids: Tensor, cache: AtlasCache) -> Callable[[], None]:
    """For a thread, which knows nothing of the modes of the one that started it."""
    half, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast("cpu", dtype, enabled=half):
            _read(model, ids, cache)

    return run


def _in_lanes(steps: Iterable[Sequence[Callable[[], None]]], threads: int) -> None:
    """The first job of every step in one thread, in their order, the second in another; no thread waits for others."""
    count = torch.get_num_threads()
    running: collections.deque[list[Future[None]]] = collections.deque()
    try:
        with contextlib.ExitStack() as stack:
            # one operation is one thread's alone
            lanes = [ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) for _ in range(threads)]
            for lane in lanes:
                stack.callback(lane.shutdown, cancel_futures=True)
            for jobs in steps:
                running.append([lane.submit(job) for lane, job in zip(lanes, jobs, strict=True)])
                if len(running) > AHEAD:
                    _finish(running.popleft())
            for jobs_left in running:
                _finish(jobs_left)
    finally:
        torch.set_num_threads(count)  # threads set it for themselves, and for those that are yet to come


def _finish(step: Sequence[Future[None]]) -> None:
    for job in step:
        job.result()
