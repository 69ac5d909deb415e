"""Models side by side in one: as wide as all of them together, each in its own block of every weight.

Skills that hinder each other while they are learned can be learned apart, joined, and trained on together. The blocks
between the parts start at zero, so that each part goes on as before but for two things: norms are taken over all of
them, and the logits are the mean of theirs. A model joined with itself is that model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atlas_memory.models.configuration_atlas import FIELDS, AtlasConfig
from atlas_memory.models.modeling_atlas import AtlasForCausalLM

# What is added up; everything else must agree.
WIDTHS = ("hidden_size", "num_attention_heads", "intermediate_size", "memory_heads")

# Weights that hold several projections one after the other: each is joined by itself.
PACKED = {"key_value.weight": 2, "gate_up.weight": 2, "memory.tokens.weight": 3, "memory.mixing": 3}

# The norm before the logits, which is divided by the number of parts: a mean, not a sum.
LAST_NORM = "model.norm.weight"


def join(parts: Sequence[AtlasForCausalLM]) -> AtlasForCausalLM:
    """One model of the parts: of the same layers, vocabulary and widths per head."""
    if not parts:
        raise ValueError("parts is empty: there is nothing to join.")
    joined = AtlasForCausalLM(_joined_config([part.config for part in parts]))
    joined.to(parts[0].dtype)  # type: ignore[arg-type]
    states = [part.state_dict() for part in parts]
    weights = {
        name: _joined_weight(name, like.shape, [state[name] for state in states])
        for name, like in joined.state_dict().items()
    }
    weights[LAST_NORM] = weights[LAST_NORM] / len(parts)
    if joined.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    joined.load_state_dict(weights)
    return joined


def _joined_config(configs: Sequence[AtlasConfig]) -> AtlasConfig:
    fields = [{name: getattr(config, name) for name in FIELDS} for config in configs]
    for name in FIELDS:
        values = [field[name] for field in fields]
        if name not in WIDTHS and any(value != values[0] for value in values):
            raise ValueError(f"parts differ in {name}: {', '.join(map(str, values))}; only widths may differ.")
    if len({config.hidden_size // config.num_attention_heads for config in configs}) > 1:
        raise ValueError("parts differ in hidden_size / num_attention_heads: heads of attention must be equally wide.")
    return AtlasConfig(**fields[0] | {name: sum(field[name] for field in fields) for name in WIDTHS})


def _joined_weight(name: str, shape: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
    """The parts along the diagonal of every dimension in which the joined weight is wider; zeros beside it."""
    packed = next((count for suffix, count in PACKED.items() if name.endswith(suffix)), 1)
    wider = [axis for axis, width in enumerate(shape) if any(width != part.shape[axis] for part in parts)]
    if not wider:  # one for all heads
        return torch.stack(list(parts)).mean(0)
    joined = parts[0].new_zeros(packed, shape[0] // packed, *shape[1:])
    begins = [0] * len(shape)
    for part in parts:
        block = part.unflatten(0, (packed, -1))
        place = [slice(None)] * len(shape)
        for axis in wider:
            place[axis] = slice(begins[axis], begins[axis] + block.shape[axis + 1])
            begins[axis] += block.shape[axis + 1]
        joined[(slice(None), *place)] = block
    return joined.flatten(0, 1)
