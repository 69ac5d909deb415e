"""A show of the operator, without training: a memory reads a long stream and is asked for what it was told.

The keys of the facts are random directions, as a trained model would make them; the write gate is the one a trained
model ends up with on such a stream: open for facts, shut for background. What remains is the memory's own work: the
state keeps its size, and the facts stay, however long the stream.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory.layers.memory import InitialWeights
from atlas_memory.ops import Gates, MemoryState, memorize, recall
from atlas_memory.spec import MemorySpec, presets

CALL = 4096  # tokens handed over at once


@dataclasses.dataclass(frozen=True)
class Progress:
    """After each call."""

    tokens: int
    state_bytes: int
    tokens_per_second: float
    recalled: float  # of all facts told so far, how many come back


def read_stream(preset: str, tokens: int, facts: int = 32, seed: int = 0) -> Iterator[Progress]:
    """Hide `facts` pairs in the first call of a stream of `tokens`, read it all, and ask again after every call."""
    spec = presets.make(preset, key_width=64, value_width=64)
    generator = torch.Generator().manual_seed(seed)
    keys = F.normalize(torch.randn(facts, 64, generator=generator), dim=-1)
    values = F.normalize(torch.randn(facts, 64, generator=generator), dim=-1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        initial = InitialWeights(spec, heads=1)()
    state: MemoryState | None = None
    done, began = 0, time.perf_counter()
    while done < tokens:
        size = min(CALL, tokens - done)
        stream = F.normalize(torch.randn(1, size, 1, 64, generator=generator), dim=-1)
        background = F.normalize(torch.randn(1, size, 1, 64, generator=generator), dim=-1)
        write = torch.zeros(1, size, 1)
        if state is None:
            places = torch.randperm(size, generator=generator)[:facts]
            stream[0, places, 0], background[0, places, 0], write[0, places, 0] = keys, values, 1.0
        with torch.inference_mode():
            _, state = memorize(spec, stream, stream, background, _gates(spec, write), initial, state=state)
        done += size
        yield Progress(done, state.nbytes, done / (time.perf_counter() - began), _recalled(spec, keys, values, state))


def _gates(spec: MemorySpec, write: Tensor) -> Gates:
    """Written where `write` is 1; nothing is forgotten."""
    return Gates(
        retention=torch.ones_like(write) if spec.retention == "learned" else None,
        momentum=torch.zeros_like(write) if spec.carries_momentum else None,
        step=write,
    )


def _recalled(spec: MemorySpec, keys: Tensor, values: Tensor, state: MemoryState) -> float:
    with torch.inference_mode():
        answers = recall(spec, keys[None, :, None], state)[0, :, 0]
    return float(((answers @ values.T).argmax(-1) == torch.arange(len(values))).float().mean())
