"""What a memory keeps: facts written once among background that is not written, and asked at the end. No training."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from atlas_memory import MemorySpec, presets
from atlas_memory.layers.memory import InitialWeights
from atlas_memory.ops import Gates, memorize, recall
from benchmarks.registry import Measured, Run, measurement

FACTS, TOKENS, WIDTH = 64, 1024, 64


def recalled(spec: MemorySpec, seed: int) -> float:
    """The share of facts whose value is the nearest to what is recalled for their key."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    def unit(*shape: int) -> torch.Tensor:
        return F.normalize(torch.randn(*shape, generator=generator), dim=-1)

    keys, values = unit(1, TOKENS, 1, WIDTH), unit(1, TOKENS, 1, WIDTH)
    places = torch.randperm(TOKENS, generator=generator)[:FACTS]
    step = torch.zeros(1, TOKENS, 1)
    step[0, places] = 1
    momentum = torch.zeros_like(step) if spec.carries_momentum else None
    gates = Gates(retention=torch.ones_like(step), momentum=momentum, step=step)
    with torch.no_grad():
        _, state = memorize(spec, keys, keys, values, gates, InitialWeights(spec, heads=1)())
        answers = recall(spec, keys[:, places], state)[0, :, 0]
    nearest = (answers @ values[0, places, 0].T).argmax(-1)
    return float((nearest == torch.arange(FACTS)).float().mean())


def mean_recalled(run: Run, preset: str, activation: str) -> Measured:
    spec = presets.make(preset, key_width=WIDTH, activation=activation)
    shares = [recalled(spec, seed) for seed in range(run.repetitions(10))]
    return Measured(sum(shares) / len(shares), {"shares": shares})


for preset, activation in (("titans", "centred_gelu"), ("titans", "gelu"), ("gated_deltanet", "centred_gelu")):
    words = f"`{preset}`" if preset == "gated_deltanet" else f"`{preset}`, activation {activation}"
    measurement(f"facts.{preset}.{activation}", f"{words}: of {FACTS} facts among {TOKENS} tokens, recalled", "%")(
        partial(mean_recalled, preset=preset, activation=activation)
    )
