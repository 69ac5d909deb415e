"""Models side by side in one: as wide as all of them together, each in its own block of every weight.

Skills that hinder each other while they are learned can be learned apart, joined, and trained on together. The blocks
between the parts start at zero, so that each part goes on as before but for two things: norms are taken over all of
them, and the logits are the mean of theirs. (Coefficients of polynomials, which all heads share, are averaged too.) A
model joined with itself is that model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atlas_memory.layers import Memory
from atlas_memory.models.configuration_atlas import FIELDS, AtlasConfig
from atlas_memory.models.modeling_atlas import AtlasForCausalLM

# What is added up; everything else must agree.
WIDTHS = ("hidden_size", "num_attention_heads", "intermediate_size", "memory_heads")

# Weights that hold several projections one after the other, and their shares: each is joined by itself. Of a memory's
# queries, keys and values: `Memory.widths`.
PACKED = {"key_value.weight": (1, 1), "gate_up.weight": (1, 1)}
PACKED_IN_MEMORIES = ("tokens.weight", "mixing")

# The norm before the logits, which is divided by the number of parts: a mean, not a sum.
LAST_NORM = "model.norm.weight"


def join(parts: Sequence[AtlasForCausalLM]) -> AtlasForCausalLM:
    """One model of the parts: of the same layers, vocabulary and widths per head."""
    if not parts:
        raise ValueError("parts is empty: there is nothing to join.")
    joined = AtlasForCausalLM(joined_config([part.config for part in parts]))
    joined.to(parts[0].dtype)  # type: ignore[arg-type]
    states, shares = [part.state_dict() for part in parts], _shares(joined)
    weights = {
        name: _joined_weight([state[name] for state in states], like.shape, shares[name])
        for name, like in joined.state_dict().items()
    }
    weights[LAST_NORM] = weights[LAST_NORM] / len(parts)
    if joined.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    joined.load_state_dict(weights)
    return joined


def joined_config(configs: Sequence[AtlasConfig]) -> AtlasConfig:
    """Of the model that `join` makes of models with these."""
    fields = [{name: getattr(config, name) for name in FIELDS} for config in configs]
    for name in FIELDS:
        values = [field[name] for field in fields]
        if name not in WIDTHS and any(value != values[0] for value in values):
            raise ValueError(f"parts differ in {name}: {', '.join(map(str, values))}; only widths may differ.")
    if len({config.hidden_size // config.num_attention_heads for config in configs}) > 1:
        raise ValueError("parts differ in hidden_size / num_attention_heads: heads of attention must be equally wide.")
    return AtlasConfig(**fields[0] | {name: sum(field[name] for field in fields) for name in WIDTHS})


def _shares(model: AtlasForCausalLM) -> dict[str, Sequence[int]]:
    """Of the projections in each weight."""
    shares: dict[str, Sequence[int]] = {
        name: next((counts for suffix, counts in PACKED.items() if name.endswith(suffix)), (1,))
        for name in model.state_dict()
    }
    for path, module in model.named_modules():
        if isinstance(module, Memory):
            shares |= {f"{path}.{name}": module.widths for name in PACKED_IN_MEMORIES}
    return shares


def _joined_weight(parts: Sequence[Tensor], shape: Sequence[int], shares: Sequence[int]) -> Tensor:
    """The parts along the diagonal of every dimension in which the joined weight is wider; zeros beside it."""
    wider = [axis for axis, width in enumerate(shape) if any(width != part.shape[axis] for part in parts)]
    if not wider:  # one for all heads
        return torch.stack(list(parts)).mean(0)
    split = [part.split([part.shape[0] * share // sum(shares) for share in shares]) for part in parts]
    return torch.cat([_diagonal(blocks, wider) for blocks in zip(*split, strict=True)])


def _diagonal(blocks: Sequence[Tensor], axes: Sequence[int]) -> Tensor:
    shape = list(blocks[0].shape)
    for axis in axes:
        shape[axis] = sum(block.shape[axis] for block in blocks)
    joined, begins = blocks[0].new_zeros(shape), [0] * len(shape)
    for block in blocks:
        place = [slice(None)] * len(shape)
        for axis in axes:
            place[axis] = slice(begins[axis], begins[axis] + block.shape[axis])
            begins[axis] += block.shape[axis]
        joined[tuple(place)] = block
    return joined
