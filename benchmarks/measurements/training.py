"""What the training loop adds to the bare model, in the `quick` recipe."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from atlas_memory.models import AtlasForCausalLM
from atlas_memory.train.loop import Training, make_accelerator
from atlas_memory.train.optimizers import make_optimizers
from atlas_memory.train.recipe_files import load_recipe
from atlas_memory.train.records import LOG, Records
from benchmarks.registry import Measured, Run, at_least, at_most, measurement
from benchmarks.timing import interleave, ratio

# No evaluations or checkpoints: their share is whatever a recipe asks for. One step in five is logged and watched.
CHANGES = ["evaluation.every=0", "checkpoint.every=0", "loop.steps=100000", "logging.tensorboard=false"]
STEPS = 5  # of a repetition


@functools.cache
def _trained(run: Run) -> dict[str, Any]:
    """Steps of the loop in turn with forward, backward and step of the same model on batches that lie ready."""
    recipe = load_recipe("quick", CHANGES)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(recipe, Path(folder), make_accelerator(recipe, Path(folder)), progress=False)
        bare = AtlasForCausalLM(training.learner.model.config)
        (optimizer,) = make_optimizers(bare, recipe.optimizer)
        ready = [next(training.train_data).model_inputs() for _ in range(STEPS)]

        def bare_steps() -> float:
            start = time.perf_counter()
            for inputs in ready:
                bare(**inputs, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return time.perf_counter() - start

        with Records(Path(folder), recipe, training.accelerator, 0, progress=False) as records:

            def loop_steps() -> float:
                start = time.perf_counter()
                for _ in range(STEPS):
                    training.step(records)
                return time.perf_counter() - start

            seconds = interleave({"loop": loop_steps, "bare": bare_steps}, run.repetitions(7))
        lines = [json.loads(line) for line in (Path(folder) / LOG).read_text(encoding="utf-8").splitlines()]
    waits = [line["waited_for_data"] for line in lines[1:]]  # the first one opens the files
    return {"seconds": seconds, "waits": waits, "tokens": STEPS * recipe.data.rows.batch * recipe.data.rows.length}


@measurement("training.throughput", "tokens/s of the `quick` recipe against the bare model", "%", at_least(0.8))
def throughput(run: Run) -> Measured:
    raw = _trained(run)
    note = f"{raw['tokens'] / min(raw['seconds']['loop']):,.0f} tokens/s at best"
    return Measured(ratio(raw["seconds"], "bare", "loop"), raw, note)


@measurement("training.waiting", "share of a step of `quick` spent waiting for data", "%", at_most(0.05))
def waiting(run: Run) -> Measured:
    waits = _trained(run)["waits"]
    return Measured(sum(waits) / len(waits), {"waits": waits}, f"{len(waits)} steps; the longest {max(waits):.2%}")
