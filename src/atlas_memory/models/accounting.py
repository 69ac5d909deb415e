"""What a model costs before it exists: parameters, state, FLOPs.

Everything is built and run on the meta device, where tensors have shapes but no numbers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from atlas_memory.layers import Block
from atlas_memory.layers.initial_weights import InitialWeights
from atlas_memory.models.configuration_atlas import AtlasConfig
from atlas_memory.models.modeling_atlas import AtlasForCausalLM

# The paper's sizes. The width of the feed-forward layers is fitted to the number, since a memory's own share of it
# differs from preset to preset: `sized_config`.
SIZES: dict[str, dict[str, int]] = {
    "170m": {"parameters": 170_000_000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "340m": {"parameters": 340_000_000, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    "760m": {"parameters": 760_000_000, "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1.3b": {"parameters": 1_300_000_000, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16},
}

# Tokens by which a reading is continued to see what its state grows by.
LONGER_BY = 64

# Feed-forward widths are multiples of this.
WIDTH_STEP = 64


@dataclasses.dataclass(frozen=True)
class Account:
    """Of one sequence and one token, as a model is served: weights in bfloat16, fast weights in float32."""

    slow_parameters: int  # everything the outer loop learns, but for the next
    initial_parameters: int  # the values fast weights start reading with
    state_bytes: int  # per sequence, once every window is full
    growth_bytes: float  # per further token: 0 where the state is of constant size
    forward_flops: float  # per token
    training_flops: float  # per token, forward and backward
    transformer_bytes: int  # per token: the KV cache of a Transformer of the same depth and width, in bfloat16
    context: int  # tokens the FLOPs are an average over

    @property
    def crossover(self) -> float | None:
        """The length from which on the state is smaller than that cache; None: never."""
        saved = self.transformer_bytes - self.growth_bytes
        return (self.state_bytes - self.growth_bytes * self.context) / saved if saved > 0 else None

    def rows(self) -> list[tuple[str, str]]:
        """Names and numbers for a person."""
        crossover = "never" if self.crossover is None else f"{max(0, self.crossover):,.0f} tokens"
        growth = f", and {self.growth_bytes:,.0f} bytes for every further token" if self.growth_bytes else ""
        return [
            ("slow parameters", f"{self.slow_parameters:,}"),
            ("initial values of fast weights", f"{self.initial_parameters:,}"),
            ("state per sequence", f"{self.state_bytes / 1e6:,.1f} MB{growth}"),
            ("KV cache of a Transformer like it", f"{self.transformer_bytes:,} bytes per token"),
            ("the state is smaller from", crossover),
            (f"forward FLOPs per token, {self.context:,} read", f"{self.forward_flops / 1e9:,.3f} G"),
            (f"training FLOPs per token, {self.context:,} read", f"{self.training_flops / 1e9:,.3f} G"),
        ]


def sized_config(size: str, **fields: Any) -> AtlasConfig:
    """A named size, with feed-forward layers as wide as its number of slow parameters asks for."""
    parameters, described = named_size(size, fields)
    return fitted_config(parameters, **described)


def named_size(size: str, fields: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The number of slow parameters of a size, and its widths and depth, where the fields do not give others."""
    if str(size).lower() not in SIZES:
        raise ValueError(f"size={size!r} is unknown; known: {', '.join(SIZES)}.")
    _check_not_fitted(fields)
    row = dict(SIZES[str(size).lower()])
    return row.pop("parameters"), {**row, **fields}


def _check_not_fitted(fields: Mapping[str, Any]) -> None:
    given = fields.get("intermediate_size")
    if given is not None:
        raise ValueError(f"intermediate_size={given!r} must be left out: it is fitted to the number of parameters.")


def fitted_config(
    parameters: int, *, initial: bool = False, width_step: int = WIDTH_STEP, **fields: Any
) -> AtlasConfig:
    """Feed-forward layers as wide, in steps, as the number of slow parameters asks for, and at least one step.

    initial: the number includes the initial values of fast weights, as a comparison of small models must.
    """
    _check_not_fitted(fields)

    def made(steps: int) -> AtlasConfig:
        return AtlasConfig(**{**fields, "intermediate_size": width_step * steps})

    (slow, fast), (more, _) = (count_parameters(made(steps)) for steps in (1, 2))
    return made(1 + max(0, round((parameters - slow - (fast if initial else 0)) / (more - slow))))


def count_parameters(config: AtlasConfig) -> tuple[int, int]:
    """Slow parameters, and initial values of fast ones."""
    with torch.device("meta"):
        model = AtlasForCausalLM(config)
    initial = sum(
        parameter.numel()
        for module in model.modules()
        if isinstance(module, InitialWeights)
        for parameter in module.parameters()
    )
    return sum(parameter.numel() for parameter in model.parameters()) - initial, initial


def account(config: AtlasConfig, context: int = 1024) -> Account:
    """The costs of a model that reads `context` tokens: one block of each kind is measured, and counted."""
    if context < 1:
        raise ValueError(f"context={context} must be at least 1.")
    slow, initial = count_parameters(config)
    state, growth = 0, 0.0
    head = 2 * config.hidden_size * config.vocab_size
    forward, training = float(head), 3.0 * head
    for kind, count in Counter(config.layer_types).items():
        with torch.device("meta"):
            measured = _measure(Block(**config.block_arguments(kind)).bfloat16(), context)
        state, growth = state + count * measured.state_bytes, growth + count * measured.growth_bytes
        forward, training = forward + count * measured.forward_flops, training + count * measured.training_flops
    return Account(
        slow_parameters=slow,
        initial_parameters=initial,
        state_bytes=state,
        growth_bytes=growth,
        forward_flops=forward,
        training_flops=training,
        transformer_bytes=2 * config.num_hidden_layers * config.hidden_size * 2,
        context=context,
    )


class _Measured(NamedTuple):
    """One block; as in `Account`."""

    state_bytes: int
    growth_bytes: float
    forward_flops: float
    training_flops: float


def _measure(block: Block, context: int) -> _Measured:
    x = torch.empty(1, context, block.norm.weight.shape[0], dtype=block.norm.weight.dtype)
    with FlopCounterMode(display=False) as forward:
        outputs, state = block(x.requires_grad_())
    with FlopCounterMode(display=False) as backward:
        outputs.sum().backward()
    more = min(context, LONGER_BY)
    with torch.no_grad():
        _, later = block(x[:, :more], state.detach())
    one_way = forward.get_total_flops() / context
    return _Measured(
        state_bytes=state.nbytes,
        growth_bytes=(later.nbytes - state.nbytes) / more,
        forward_flops=one_way,
        training_flops=one_way + backward.get_total_flops() / context,
    )
