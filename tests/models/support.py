"""Small models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atlas_memory import AtlasConfig, AtlasForCausalLM
from atlas_memory.models.configuration_atlas import BACKBONES
from atlas_memory.spec import presets
from tests.support import SMALL, talkative

VOCABULARY = 23
SEGMENT = 8
WINDOW = 5

# Every preset, in turn with the backbones; and the paper's own memories in all of them.
PAIRS = [(preset, BACKBONES[place % len(BACKBONES)]) for place, preset in enumerate(presets.names())]
PAIRS += [(preset, name) for preset in ("atlas", "titans") for name in BACKBONES if (preset, name) not in PAIRS]

MIXED = ["full_attention", "{preset}", "sliding_attention", "deltanet"]


def layers_of(preset: str, layers: str) -> dict[str, Any]:
    """One layer of a preset, or a stack with attention of both kinds and another memory."""
    if layers == "one":
        return {"preset": preset, "num_hidden_layers": 1}
    kinds = [kind.format(preset=preset) for kind in MIXED]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def small_config(**fields: Any) -> AtlasConfig:
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "memory_heads": 2,
        "memory": SMALL,
        "sliding_window": WINDOW,
        "segment_length": SEGMENT,
        "pad_token_id": 0,
        "preset": None if "layer_types" in fields else "titans",
    }
    return AtlasConfig(**{**defaults, **fields})


def small_model(dtype: torch.dtype = torch.float64, **fields: Any) -> AtlasForCausalLM:
    """The same one for the same arguments, with weights large enough for answers to differ."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = talkative(AtlasForCausalLM(small_config(**{"initializer_range": 0.3, **fields})))
    return model.to(dtype).eval()


def token_ids(batch: int, count: int, seed: int = 0) -> Tensor:
    """(B, T), none of them padding."""
    return torch.randint(1, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def left_padded(batch: int, count: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
    ids, mask = token_ids(batch, count), torch.zeros(batch, count, dtype=torch.long)
    for row, n in enumerate(lengths):
        mask[row, count - n :] = 1
    return ids * mask, mask
