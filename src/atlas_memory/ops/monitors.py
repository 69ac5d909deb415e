"""What happened inside: surprise, guards, norms and gates. Gathered only on request.

Shapes: B batch, T tokens, H heads, R = B·H rows, C tokens of a chunk, N tokens whose gradients it uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_memory.ops.call import Call
from atlas_memory.ops.exact_matrix import ImpulseChunk
from atlas_memory.ops.fast_weights import FastWeights
from atlas_memory.ops.features import Feature, Identity
from atlas_memory.ops.networks import Factors
from atlas_memory.ops.optimizers import Gates, window_bands
from atlas_memory.ops.stability import safe_norm
from atlas_memory.spec import MemorySpec

_PLAIN = Identity()


class Record(NamedTuple):
    """Of one chunk."""

    surprise: Tensor  # (R, C)
    context_surprise: Tensor  # (R, C)
    limits: Mapping[str, Tensor] = {}  # {site: ℓ (R, C)}
    retraction: Mapping[str, Tensor] = {}  # {leaf: factor (R, 1, 1)}

    @staticmethod
    def of_factors(
        factors: Mapping[str, Factors], features: Mapping[str, Feature], surprise: Tensor, gates: Gates, size: int
    ) -> Record:
        """Surprise of a context: the norm of Σ_j γ_tj ∇_{t−j}, by inner products of rank-one gradients.

        features: of the sites that see them; the others see plain vectors.
        """
        some = next(iter(factors.values())).inputs
        bands = window_bands(gates, some[:, -size:], some.shape[1])
        products = [
            features.get(site, _PLAIN).inner(f.inputs, f.inputs) * (f.deltas @ f.deltas.mT)
            for site, f in factors.items()
        ]
        squares = ((bands @ torch.stack(products).sum(0)) * bands).sum(-1)
        return Record(surprise[:, -size:], squares.clamp_min(0).sqrt())

    @staticmethod
    def of_impulses(feature: Feature, chunk: ImpulseChunk, errors: Tensor, window: int) -> Record:
        """Exact memories: impulses (t, j), j = 0 being the token itself."""
        surprise = surprise_of({"down": Factors(chunk.inputs, errors)}, {"down": feature})
        surprise = surprise.unflatten(1, (-1, window))[..., 0]
        gates = chunk.window_gates  # (R, C, W)
        inputs, deltas = (x.unflatten(1, (-1, window)) for x in (chunk.inputs, errors))
        products = feature.inner(inputs, inputs) * (deltas @ deltas.mT)
        squares = ((gates[..., None, :] @ products)[..., 0, :] * gates).sum(-1)
        limits = {} if chunk.limits is None else {"down": chunk.limits}
        return Record(surprise, squares.clamp_min(0).sqrt(), limits)


def surprise_of(factors: Mapping[str, Factors], features: Mapping[str, Feature]) -> Tensor:
    """‖∇ℓ‖ over all fast layers (R, N): a gradient of rank one has the product of its factors' norms."""
    norms = [features.get(site, _PLAIN).norm(f.inputs) * safe_norm(f.deltas, -1) for site, f in factors.items()]
    return safe_norm(torch.cat(norms, dim=-1), -1)[..., 0]


@dataclasses.dataclass
class Monitors:
    """Hand an empty one to a call; it comes back filled. Tokens beyond a row's length are zero.

    surprise, context_surprise (B, T, H); limiter {site: ℓ (B, T, H)}, 1 where it did not act; retraction
    {leaf: (B, H)}, the smallest factor in the call; weight_norms {site: (B, H)} at the last anchor, of an infinite
    layer those of its vectors; gates as they were used; mean_write: the mean of `writes` over real tokens,
    differentiable, for a training loss to penalise; tokens: how many these are.
    """

    surprise: Tensor | None = None
    context_surprise: Tensor | None = None
    limiter: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    retraction: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    weight_norms: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    gates: Gates | None = None
    mean_write: Tensor | None = None
    tokens: int = 0
    _records: list[Record] = dataclasses.field(default_factory=list, repr=False)
    _writes: Tensor | None = dataclasses.field(default=None, repr=False)

    @property
    def writes(self) -> Tensor:
        """How far every token (B, T, H) opens the gates it is written by, from 0 to 1: η·γ, of Muon their mean."""
        assert self._writes is not None, "no call has filled these monitors"
        return self._writes

    def add(self, record: Record) -> None:
        self._records.append(record)

    def finish(self, call: Call, now: FastWeights, unaligned: Callable[[Tensor], Tensor]) -> None:
        """Join the records of a call. `unaligned`: (R, L) → (B, T, H)."""
        batch, heads = call.keys.shape[0], call.keys.shape[2]
        records, self._records = self._records, []
        self.watch_writes(call)
        self.gates = call.gates
        self.weight_norms = {site: safe_norm(x, (-2, -1)).reshape(batch, heads) for site, x in now.weights.items()}
        leaves = [f"weights.{site}" for site in call.spec.fast] + [f"momentum.{site}" for site in now.momentum]
        self.retraction = {leaf: call.keys.new_ones(batch, heads) for leaf in leaves if call.spec.retracts}
        nothing = call.keys.new_zeros(call.keys.shape[:3])
        self.surprise = self.context_surprise = nothing
        self.limiter = dict.fromkeys(call.spec.fast if call.spec.limits_writes else (), nothing)
        if not records:
            return

        def per_token(parts: Sequence[Tensor]) -> Tensor:
            return unaligned(torch.cat(list(parts), dim=1)[:, : max(self._aligned_length(call))])

        self.surprise = per_token([record.surprise for record in records])
        self.context_surprise = per_token([record.context_surprise for record in records])
        self.limiter = {s: per_token([record.limits[s] for record in records]) for s in records[0].limits}
        for record in records:
            for leaf, factor in record.retraction.items():
                self.retraction[leaf] = torch.minimum(self.retraction[leaf], factor.reshape(batch, heads))

    def watch_writes(self, call: Call) -> None:
        self._writes = _written(call.spec, call.gates, call.keys)
        real = torch.arange(self._writes.shape[1]) < torch.tensor(call.lengths)[:, None]
        weight = real.to(self._writes)[..., None].expand_as(self._writes)
        self.mean_write = (self._writes * weight).sum() / weight.sum().clamp_min(1)
        self.tokens = sum(call.lengths)

    @staticmethod
    def _aligned_length(call: Call) -> list[int]:
        return [fill + length for fill, length in zip(call.state.fill, call.lengths, strict=True)]

    def join(self, parts: Sequence[Monitors], order: list[int]) -> None:
        """Rows of several monitors, put into the order they had in the call."""

        def cat(values: list[Any]) -> Any:
            if values[0] is None:
                return None
            if isinstance(values[0], dict):
                return {key: cat([value[key] for value in values]) for key in values[0]}
            if isinstance(values[0], Gates):
                return Gates(*(cat(list(leaves)) for leaves in zip(*values, strict=True)))
            return torch.cat(values)[order]

        for name in ("surprise", "context_surprise", "limiter", "retraction", "weight_norms", "gates"):
            setattr(self, name, cat([getattr(part, name) for part in parts]))


def _written(spec: MemorySpec, gates: Gates, like: Tensor) -> Tensor:
    """η_t · mean_j γ_tj (B, T, H).

    Of Muon the mean of both: γ decides what momentum gathers, η what becomes of it at the next update point, and a
    token leaves no trace only where both are zero.
    """
    step = like.new_ones(like.shape[:3]) if gates.step is None else gates.step
    if gates.window is None:
        return step
    window = gates.window.mean(-1)
    return (step + window) / 2 if spec.optimizer == "muon" else step * window
