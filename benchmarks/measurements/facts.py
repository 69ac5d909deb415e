"""What a memory keeps: facts written once among background that is not written, and asked at the end. No training."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from atlas_memory import MemorySpec, presets
from atlas_memory.layers.initial_weights import InitialWeights
from atlas_memory.ops import Gates, memorize, recall
from atlas_memory.ops.features import taylor_coefficients
from benchmarks.registry import Measured, Run, measurement

FACTS, TOKENS = 64, 1024


def recalled(spec: MemorySpec, seed: int) -> float:
    """The share of facts whose value is the nearest to what is recalled for their key."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    def unit(*shape: int) -> torch.Tensor:
        return F.normalize(torch.randn(*shape, generator=generator), dim=-1)

    keys, values = unit(1, TOKENS, 1, spec.key_width), unit(1, TOKENS, 1, spec.value_width)
    places = torch.randperm(TOKENS, generator=generator)[:FACTS]
    step = torch.zeros(1, TOKENS, 1)
    step[0, places] = 1
    momentum = torch.zeros_like(step) if spec.carries_momentum else None
    window = F.pad(torch.ones_like(step)[..., None], (0, spec.window - 1)) if spec.window > 1 else None
    gates = Gates(retention=torch.ones_like(step), momentum=momentum, step=step, window=window)
    polynomial = spec.feature == "polynomial"
    coefficients = F.normalize(torch.tensor(taylor_coefficients(spec.degree)), dim=0) if polynomial else None
    with torch.no_grad():
        initial = InitialWeights(spec, heads=1)()
        _, state = memorize(spec, keys, keys, values, gates, initial, coefficients=coefficients)
        answers = recall(spec, keys[:, places], state, coefficients=coefficients)[0, :, 0]
    nearest = (answers @ values[0, places, 0].T).argmax(-1)
    return float((nearest == torch.arange(FACTS)).float().mean())


def mean_recalled(run: Run, spec: MemorySpec) -> Measured:
    shares = [recalled(spec, seed) for seed in range(run.repetitions(10))]
    return Measured(sum(shares) / len(shares), {"shares": shares})


_NARROW = {"key_width": 32, "expansion": 2, "residual": False}
MEMORIES: dict[str, tuple[str, MemorySpec]] = {  # name → what is compared, and the memory
    "titans.centred_gelu": ("`titans`", presets.make("titans")),
    "titans.gelu": ("`titans`, activation gelu", presets.make("titans", activation="gelu")),
    "gated_deltanet": ("`gated_deltanet`", presets.make("gated_deltanet")),
    "titans.narrow": ("`titans`, keys of 32, 64 hidden units, no residual", presets.make("titans", **_NARROW)),
    "omeganet.narrow": ("`omeganet`, keys of 32, 64 hidden units, no residual", presets.make("omeganet", **_NARROW)),
}
for name, (words, spec) in MEMORIES.items():
    measurement(f"facts.{name}", f"{words}: of {FACTS} facts among {TOKENS} tokens, recalled", "%")(
        partial(mean_recalled, spec=spec)
    )
