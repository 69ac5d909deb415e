"""Reading for long, and token by token."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import Any

import torch

from atlas_memory import Memory
from benchmarks.child import Child
from benchmarks.registry import Measured, Run, at_most, measurement
from benchmarks.subjects import STANDARD
from benchmarks.timing import interleave, ratio

# Memory is also read in the middle: what the allocator takes once in its life comes between the first two.
EARLY, MIDDLE, LATE = 10_240, 102_400, 1_000_000


@functools.cache
def _streamed(run: Run) -> dict[str, Any]:
    """A million tokens are read once; two records tell of it."""
    late = 20 * EARLY if run.quick else LATE
    with Child(sys.executable, "benchmarks.streaming:Stream", preset="titans", dim=64, heads=2, key_width=16) as stream:
        places = {"early": stream.call("read_until", tokens=EARLY, name="early")}
        places["middle"] = stream.call("read_until", tokens=MIDDLE, name="middle")
        places["late"] = stream.call("read_until", tokens=late, name="late")
        candidates = {name: functools.partial(stream.call, "seconds", name=name) for name in ("early", "late")}
        seconds = interleave(candidates, run.repetitions(25))
    return {"places": places, "seconds": seconds}


def _note(raw: dict[str, Any]) -> str:
    return " against ".join(f"{raw['places'][name]['tokens']:,}" for name in ("late", "early")) + " tokens"


@measurement("streaming.time", "time per token late in a stream against early, `titans`", "×", at_most(1.10))
def streaming_time(run: Run) -> Measured:
    raw = _streamed(run)
    return Measured(ratio(raw["seconds"], "late", "early"), raw, _note(raw))


@measurement("streaming.memory", "growth of resident memory late in a stream over early, `titans`", "MB", at_most(4e6))
def streaming_memory(run: Run) -> Measured:
    raw = _streamed(run)
    early, late = raw["places"]["early"], raw["places"]["late"]
    if early["state_bytes"] != late["state_bytes"]:
        raise ArithmeticError(f"the state grew from {early['state_bytes']} to {late['state_bytes']} bytes.")
    since_middle = (late["resident_bytes"] - raw["places"]["middle"]["resident_bytes"]) / 1e6
    note = f"{_note(raw)}; {since_middle:+.1f} MB since {MIDDLE:,}"
    return Measured(late["resident_bytes"] - early["resident_bytes"], {"places": raw["places"]}, note)


@torch.inference_mode()
def decode(run: Run, preset: str) -> Measured:
    """One token at a time, averaged over the places in a chunk, against the same chunk in one call; one row."""
    torch.manual_seed(0)
    memory = Memory(STANDARD.dim, STANDARD.heads, preset)
    chunk = memory.spec.chunk
    _, state = memory(torch.randn(1, 4 * chunk, STANDARD.dim))
    x = torch.randn(1, chunk, STANDARD.dim)

    def seconds_of(pieces: tuple[torch.Tensor, ...]) -> float:
        now, start = state, time.perf_counter()
        for piece in pieces:
            _, now = memory(piece, now)
        return (time.perf_counter() - start) / len(pieces)

    candidates = {
        "one token": lambda: seconds_of(x.split(1, dim=1)),
        "one chunk": lambda: seconds_of((x,)),
    }
    seconds = interleave(candidates, run.repetitions(15))
    tokens_per_second = 1 / statistics.median(seconds["one token"])
    return Measured(
        ratio(seconds, "one token", "one chunk"), {"seconds": seconds}, f"{tokens_per_second:,.0f} tokens/s decoded"
    )


for preset in ("titans", "atlas", "gated_deltanet"):
    words = f"`{preset}`: time of a one-token call against a call of one chunk, one row"
    measurement(f"decode.{preset}", words, "×")(functools.partial(decode, preset=preset))
