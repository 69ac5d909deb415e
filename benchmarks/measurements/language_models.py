"""Whole language models: a token decoded after a long context, beside a Llama of the same size with its KV cache."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from typing import Any

import torch

from atlas_memory import AtlasConfig, AtlasForCausalLM
from benchmarks.llama import filled, llama_like, nbytes
from benchmarks.registry import Measured, Run, measurement
from benchmarks.timing import interleave

WIDTH, LAYERS, HEADS, VOCABULARY = 256, 4, 4, 1024
CONTEXTS = (1024, 32 * 1024, 256 * 1024)
QUICK_CONTEXTS = (512, 1024)
TOKENS = 16  # decoded per repetition


def atlas(preset: str) -> AtlasForCausalLM:
    torch.manual_seed(0)
    config = AtlasConfig(
        preset=preset,
        backbone="mag",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    return AtlasForCausalLM(config).eval()


@torch.inference_mode()
def seconds_per_token(model: Any, cache: Any) -> float:
    token, start = torch.zeros(1, 1, dtype=torch.long), time.perf_counter()
    for _ in range(TOKENS):
        model(token, past_key_values=cache)
    return (time.perf_counter() - start) / TOKENS


@torch.inference_mode()
def decode(preset: str, run: Run) -> Measured:
    ours = atlas(preset)
    theirs = llama_like(ours, 2 * max(CONTEXTS))
    contexts = QUICK_CONTEXTS if run.quick else CONTEXTS
    cache, rows, seconds = None, {}, {}
    for context in contexts:
        read = 0 if cache is None else cache.get_seq_length()
        cache = ours.read(torch.randint(VOCABULARY, (1, max(context - read, 1))), cache, progress=False)
        kept = filled(theirs, context)
        taken = interleave(
            {
                "ours": functools.partial(seconds_per_token, ours, cache),
                "llama": functools.partial(seconds_per_token, theirs, kept),
            },
            run.repetitions(5),
        )
        medians = {name: statistics.median(values) for name, values in taken.items()}
        rows[context] = {**medians, "our_bytes": cache.nbytes, "llama_bytes": nbytes(kept)}
        seconds |= {f"{name} {context}": values for name, values in taken.items()}
    last, meeting = rows[contexts[-1]], crossover(rows)
    return Measured(
        last["llama"] / last["ours"],
        {"seconds": seconds, "contexts": rows, "parameters": [ours.num_parameters(), theirs.num_parameters()]},
        "; ".join(
            f"{context:,} tokens: {row['ours'] * 1e3:.1f} against {row['llama'] * 1e3:.1f} ms a token, "
            f"{row['our_bytes'] / 1e6:.1f} against {row['llama_bytes'] / 1e6:.1f} MB"
            for context, row in rows.items()
        )
        + f"; equal at {'none of these lengths' if meeting is None else f'about {meeting:,.0f} tokens'}",
    )


def crossover(rows: dict[int, dict[str, float]]) -> float | None:
    """The context at which both take the same time, between two that were measured; None: they do not meet."""
    behind = {context: row["llama"] - row["ours"] for context, row in rows.items()}
    for (short, before), (long, after) in itertools.pairwise(behind.items()):
        if before < 0 <= after:
            return short + (long - short) * before / (before - after)
    return None


for _preset in ("gated_deltanet", "titans", "atlas"):
    measurement(
        f"language_models.decode.{_preset}",
        f"`{_preset}` with MAG, {LAYERS} layers of {WIDTH}: speed of decoding against a Llama of the same size "
        "with its KV cache, after the longest context",
        "×",
    )(functools.partial(decode, _preset))
