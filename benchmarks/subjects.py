"""Our side of the comparisons: the layer and the operator as pieces of work of one standard size.

Shapes: B batch, T tokens, H heads, D key width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory import Memory, MemorySpec, presets
from atlas_memory.ops import Gates, memorize
from benchmarks import plain_muon
from benchmarks.work import Work


@dataclasses.dataclass(frozen=True)
class Size:
    """The standard work: float32, 2 rows of 1,024 tokens, width 256, 4 heads of 64, hidden ×4, chunks of 64."""

    batch: int = 2
    tokens: int = 1024
    dim: int = 256
    heads: int = 4
    key_width: int = 64
    expansion: int = 4
    chunk: int = 64

    def network(self) -> dict[str, int]:
        """The fields of a MemorySpec that are the same in every comparison."""
        return {"key_width": self.key_width, "expansion": self.expansion, "chunk": self.chunk}


STANDARD = Size()
TINY = Size(batch=1, tokens=128, dim=16, heads=2, key_width=8)


def sized(tokens: int) -> Size:
    return dataclasses.replace(STANDARD, tokens=tokens)


def layer(preset: str, size: Size = STANDARD, **overrides: Any) -> Work:
    """`Memory`, with its projections, at the standard widths."""
    return default_layer(preset, size, **{**size.network(), **overrides})


def default_layer(preset: str, size: Size = STANDARD, **overrides: Any) -> Work:
    """`Memory`, with its projections, at the preset's own widths."""
    torch.manual_seed(0)
    memory = Memory(size.dim, size.heads, preset, **overrides)
    x = torch.randn(size.batch, size.tokens, size.dim, requires_grad=True)
    return Work(lambda: memory(x)[0], [x, *memory.parameters()])


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Of the operator; every tensor wants a gradient."""

    spec: MemorySpec
    queries: Tensor  # (B, T, H, D), unit vectors
    keys: Tensor  # (B, T, H, D), unit vectors
    values: Tensor  # (B, T, H, D)
    gates: Gates
    initial: dict[str, Tensor] | None  # {site: (H, out, in)}

    def leaves(self) -> list[Tensor]:
        gates = [gate for gate in self.gates if gate is not None]
        return [self.queries, self.keys, self.values, *gates, *(self.initial or {}).values()]

    def work(self, operator: Callable[..., tuple[Tensor, Any]] = memorize) -> Work:
        def forward() -> Tensor:
            return operator(self.spec, self.queries, self.keys, self.values, self.gates, self.initial)[0]

        return Work(forward, self.leaves())


def operator_arguments(preset: str, size: Size = STANDARD, **overrides: Any) -> Arguments:
    """Random ones, gates near where a layer's start. For presets with learned gates and window 1."""
    torch.manual_seed(0)
    spec = presets.make(preset, **{**size.network(), **overrides})
    if spec.window != 1 or spec.retention != "learned" or spec.step != "learned":
        raise ValueError(f"preset={preset!r} must have window 1 and learned gates.")
    tokens = (size.batch, size.tokens, size.heads)
    queries, keys, values = torch.randn(3, *tokens, size.key_width)
    noise = torch.rand(3, *tokens)
    step = 0.5 / spec.interval if spec.optimizer == "muon" else 0.5
    gates = Gates(
        retention=_leaf(1 - 0.01 * noise[0]),
        momentum=_leaf(0.25 + 0.5 * noise[1]) if spec.carries_momentum else None,
        step=_leaf(step * (0.5 + noise[2])),
    )
    unit = (_leaf(F.normalize(x, dim=-1)) for x in (queries, keys))
    return Arguments(spec, *unit, _leaf(values / math.sqrt(size.key_width)), gates, _initial(spec, size.heads))


def infinite_arguments(preset: str, size: Size = STANDARD) -> Arguments:
    """For a preset with infinite features, at its own widths but for the keys'."""
    torch.manual_seed(0)
    spec = presets.make(preset, key_width=size.key_width, chunk=size.chunk)
    tokens = (size.batch, size.tokens, size.heads)
    queries, keys, values = torch.randn(3, *tokens, size.key_width)
    gates = Gates(
        step=_leaf(torch.rand(*tokens)) if spec.step == "learned" else None,
        window=_leaf(torch.rand(*tokens, spec.window)) if spec.window > 1 else None,
    )
    unit = (_leaf(F.normalize(x, dim=-1)) for x in (queries, keys))
    return Arguments(spec, *unit, _leaf(values / math.sqrt(size.key_width)), gates, _initial(spec, size.heads))


def _initial(spec: MemorySpec, heads: int) -> dict[str, Tensor] | None:
    if spec.network == "matrix":
        return None
    scales = {"down": 0.5 / math.sqrt(spec.value_width)}
    return {s: _leaf(torch.randn(heads, *shape) * scales.get(s, 1)) for s, shape in spec.initial_shapes().items()}


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


# What a child process can be asked to make, for peak memory: settings are JSON. A small run of the same kind comes
# first, so that what a process allocates once in its life is not counted.


def titans_layer(tokens: int) -> Work:
    layer("titans", TINY).run(backward=True)
    return layer("titans", sized(tokens))


def every_token_muon(tokens: int, plain: bool) -> Work:
    """Muon with an update at every token: ours, or with plain autograd."""
    operator = plain_muon.memorize if plain else memorize
    muon_arguments(TINY).work(operator).run(backward=True)
    return muon_arguments(sized(tokens)).work(operator)


def muon_arguments(size: Size) -> Arguments:
    """For the one memory that `plain_muon` is written for: the paper's rule, without the write limiter."""
    return operator_arguments("titans", size, optimizer="muon", interval=1, activation="gelu", limiter=False)
