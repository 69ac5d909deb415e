"""Predicted against measured: step time and peak memory of small models on this machine, by train/scaling.py."""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from typing import Any

import torch

from atlas_memory.models import AtlasForCausalLM
from atlas_memory.models.configuration_atlas import AtlasConfig
from atlas_memory.train.hardware import this_machine
from atlas_memory.train.optimizers import make_optimizers
from atlas_memory.train.recipe import OptimizerConfig
from atlas_memory.train.scaling import Plan, predict
from benchmarks.child import Child
from benchmarks.registry import Measured, Run, measurement
from benchmarks.work import high_water_after

# Width and layers; four sizes of each of two memories, from tens of thousands of parameters to several millions.
SIZES = ((64, 2), (128, 2), (192, 3), (256, 4))
PRESETS = ("titans", "atlas")
ROWS, LENGTH, VOCABULARY = 4, 256, 1024


def make_plan(preset: str, width: int, layers: int) -> Plan:
    config = AtlasConfig(
        preset=preset,
        backbone="mag",
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        memory_heads=2,
        sliding_window=64,
    )
    return Plan(config, rows=ROWS, length=LENGTH, rows_per_pass=ROWS)


class Subject:
    """Training steps of one model, in a process of its own."""

    def __init__(self, preset: str, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model = AtlasForCausalLM(make_plan(preset, width, layers).config)
        (self.optimizer,) = make_optimizers(self.model, OptimizerConfig())
        self.ids = torch.randint(VOCABULARY, (ROWS, LENGTH))

    def seconds(self) -> float:
        start = time.perf_counter()
        self._loss(self.ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def peak_bytes(self) -> int:
        """Of forward and backward: gradients and activations. Weights are there before; no step may have been taken.

        What a step frees stays with the allocator, and would hide the next one's; what is loaded once in the life of a
        process is loaded by a few tokens first.
        """
        self._loss(self.ids[:1, :16]).backward()
        self.optimizer.zero_grad()
        gc.collect()
        before = high_water_after(lambda: None)
        return high_water_after(lambda: self._loss(self.ids).backward()) - before

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


@functools.cache
def _compared(run: Run, preset: str) -> dict[str, Any]:
    """Every size, measured in turn with the machine's own speeds, since these change with whatever else it does."""
    rows, seconds = {}, {}
    for width, layers in SIZES:
        plan = make_plan(preset, width, layers)
        trace = plan.trace()
        settings = {"preset": preset, "width": width, "layers": layers}
        with Child(sys.executable, "benchmarks.measurements.scaling:Subject", **settings) as subject:
            peak = subject.call("peak_bytes")
            subject.call("seconds")
            taken, machines = [], []
            for _ in range(run.repetitions(7)):
                machines.append(this_machine(repetitions=5))
                taken.append(subject.call("seconds"))
        predictions = [predict(plan, machine, trace) for machine in machines]
        name = f"{layers} × {width}"
        memory = predictions[0].memory
        seconds[name] = taken
        rows[name] = {
            "predicted_seconds": statistics.median(prediction.step for prediction in predictions),
            "measured_seconds": statistics.median(taken),
            "predicted_bytes": memory.gradients + memory.activations + memory.states,
            "measured_bytes": peak,
            "launches": trace.total(lambda part: part.launches),
        }
    return {"sizes": rows, "seconds": seconds}


def compare(quantity: str, preset: str, run: Run) -> Measured:
    """The geometric mean of predicted / measured; each size in the note."""
    raw = _compared(run, preset)
    ratios = {name: row[f"predicted_{quantity}"] / row[f"measured_{quantity}"] for name, row in raw["sizes"].items()}
    note = "layers × width: " + "; ".join(f"{name}: {value:.2f}" for name, value in ratios.items())
    return Measured(statistics.geometric_mean(ratios.values()), raw, note)


for _preset in PRESETS:
    for _quantity, _words in (("seconds", "time of a training step"), ("bytes", "peak memory of a training step")):
        measurement(
            f"scaling.{_preset}.{_quantity}", f"`{_preset}` with MAG: predicted against measured {_words}", "×"
        )(functools.partial(compare, _quantity, _preset))
