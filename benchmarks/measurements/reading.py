"""The shipped model reading long texts: its speed, whether it stays, and the same with a KV cache."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import Any

import torch

from atlas_memory.models.saved import load_saved
from atlas_memory.models.shipped import model_folder
from atlas_memory.tasks.evaluation import STEP
from benchmarks.child import Child
from benchmarks.llama import filled, llama_like, nbytes
from benchmarks.registry import Measured, Run, at_least, at_most, measurement
from benchmarks.shipped_reader import TIMED
from benchmarks.timing import interleave, matmul, matmul_flops_per_second, ratio

ROWS = 8
EARLY, LATE, QUICK_LATE = 10_000, 10_000_000, 40 * STEP
CONTEXTS, QUICK_CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144), (1024, 2048)


@functools.cache
def _read(run: Run, half: bool = False) -> dict[str, Any]:
    """Measured once; two records tell of it in float32."""
    with Child(sys.executable, "benchmarks.shipped_reader:Reader", rows=ROWS, half=half) as reader:
        place = reader.call("read_until", tokens=EARLY, name="early")
        candidates = {"reading": functools.partial(reader.call, "seconds", name="early"), "matmul": matmul()}
        seconds = interleave(candidates, run.repetitions(25))
        return {"place": place, "seconds": seconds, "flops": reader.call("flops")}


@measurement("reading.speed", f"the shipped model reads, {ROWS} rows", "tokens/s", at_least(100_000))
def speed(run: Run) -> Measured:
    return _speed(_read(run))


@measurement("reading.bfloat16", "the same in bfloat16, as its evaluations from 128K on", "tokens/s", at_least(100_000))
def half_speed(run: Run) -> Measured:
    return _speed(_read(run, half=True))


def _speed(raw: dict[str, Any]) -> Measured:
    return Measured(TIMED * ROWS * STEP / statistics.median(raw["seconds"]["reading"]), raw)


@measurement("reading.matmul", "its reading in float32 as a share of the machine's matmul speed", "%", at_least(0.5))
def share(run: Run) -> Measured:
    raw = _read(run)
    reached = raw["flops"] / statistics.median(raw["seconds"]["reading"])
    machine = matmul_flops_per_second(raw["seconds"]["matmul"])["median"]
    per_token = raw["flops"] / (TIMED * ROWS * STEP) / 1e6
    return Measured(
        reached / machine, raw, f"{per_token:.2f} MFLOP a token; {reached / 1e9:.0f} of {machine / 1e9:.0f} GFLOP/s"
    )


@functools.cache
def _read_on(run: Run) -> dict[str, Any]:
    """One row, to the end: ten million tokens are minutes."""
    with Child(sys.executable, "benchmarks.shipped_reader:Reader", rows=1) as reader:
        places = {
            name: reader.call("read_until", tokens=tokens, name=name)
            for name, tokens in (("early", EARLY), ("late", QUICK_LATE if run.quick else LATE))
        }
        candidates = {name: functools.partial(reader.call, "seconds", name=name) for name in places}
        return {"places": places, "seconds": interleave(candidates, run.repetitions(25))}


@measurement("reading.time", "its time per token late in a text against early, one row", "×", at_most(1.10))
def time_stays(run: Run) -> Measured:
    raw = _read_on(run)
    tokens = " against ".join(f"{raw['places'][name]['tokens']:,}" for name in ("late", "early"))
    return Measured(ratio(raw["seconds"], "late", "early"), raw, f"{tokens} tokens")


@measurement("reading.memory", "its resident memory late in a text, one row", "MB", at_most(1e9))
def memory_stays(run: Run) -> Measured:
    places = _read_on(run)["places"]
    grown = (places["late"]["resident_bytes"] - places["early"]["resident_bytes"]) / 1e6
    note = (
        f"{grown:+.1f} MB since {places['early']['tokens']:,} tokens; state of {places['late']['state_bytes']:,} bytes"
    )
    return Measured(places["late"]["resident_bytes"], {"places": places}, note)


@measurement("reading.llama", "speed of reading against a Llama of the same size with its KV cache, one row", "×")
@torch.inference_mode()
def beside_a_llama(run: Run) -> Measured:
    """At each context both read STEP tokens more; the Llama's time grows with what it keeps."""
    ours = load_saved(model_folder("shipped"))
    contexts = QUICK_CONTEXTS if run.quick else CONTEXTS
    llama = llama_like(ours, max(contexts) + STEP)
    ids = torch.randint(ours.config.vocab_size, (1, STEP))
    state = ours.read(ids, progress=False)

    def ours_on() -> float:
        cache, start = state.copy(), time.perf_counter()
        ours.read(ids, cache, step=STEP, progress=False)
        return time.perf_counter() - start

    def llama_on(context: int) -> float:
        cache, start = filled(llama, context), time.perf_counter()
        llama.model(ids, past_key_values=cache)
        return time.perf_counter() - start

    rows, seconds = {}, {}
    for context in contexts:
        taken = interleave({"ours": ours_on, "llama": functools.partial(llama_on, context)}, run.repetitions(3))
        medians = {name: STEP / statistics.median(values) for name, values in taken.items()}
        rows[context] = {**medians, "llama_bytes": nbytes(filled(llama, context))}
        seconds |= {f"{name} {context}": values for name, values in taken.items()}
    last = rows[contexts[-1]]
    return Measured(
        last["ours"] / last["llama"],
        {"seconds": seconds, "contexts": rows, "parameters": [ours.num_parameters(), llama.num_parameters()]},
        "; ".join(
            f"after {context:,}: {row['ours']:,.0f} against {row['llama']:,.0f} tokens/s, "
            f"{state.nbytes / 1e6:.2f} against {row['llama_bytes'] / 1e6:.0f} MB"
            for context, row in rows.items()
        ),
    )
