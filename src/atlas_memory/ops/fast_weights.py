"""What one chunk hands to the next: from a state, to a state, and what happens to it at a chunk's end.

Shapes: B batch, H heads, R = B·H rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_memory.ops.entries import Entries, align_tokens, join_entries, retract_site, split_entries
from atlas_memory.ops.state import MemoryState
from atlas_memory.spec import MemorySpec


class FastWeights(NamedTuple):
    """The part of a state that one chunk hands to the next, rows flattened."""

    weights: dict[str, Tensor]  # {site: (R, out, in)}
    momentum: dict[str, Tensor]  # {fast site: (R, out, in)}; empty under gd
    pending: Tensor | None = None  # (R,); Muon only
    entries: Entries | None = None  # of an infinite first layer, whose weights have a column for each


def of_state(state: MemoryState) -> FastWeights:
    """(B, H, ...) → (R, ...)."""
    weights = {site: x.flatten(0, 1) for site, x in state.group("weights").items()}
    momentum = {site: x.flatten(0, 1) for site, x in state.group("momentum").items()}
    pending = state.tensors.get("pending")
    entries = None
    if state.spec.kernel:
        entries, columns = join_entries(state)
        weights |= columns
    return FastWeights(weights, momentum, None if pending is None else pending.flatten(0, 1), entries)


def to_tensors(spec: MemorySpec, now: FastWeights, batch: int) -> dict[str, Tensor]:
    """(R, ...) → (B, H, ...)."""
    tensors = {f"weights.{site}": x for site, x in now.weights.items()}
    cache = {}
    if now.entries is not None:
        pairs = now.entries.pairs
        cache = split_entries(now.weights, now.entries, spec.cached_sites, batch)
        tensors |= {f"weights.{site}": now.weights[site][..., :pairs] for site in spec.feature_sites}
    tensors |= {f"momentum.{site}": x for site, x in now.momentum.items()}
    if now.pending is not None:
        tensors["pending"] = now.pending
    return {name: x.unflatten(0, (batch, -1)) for name, x in tensors.items()} | cache


def choose(condition: Tensor, first: FastWeights, second: FastWeights) -> FastWeights:
    """Row by row, first where the condition (R, 1, 1) holds, else second."""
    pending = None
    if first.pending is not None and second.pending is not None:
        pending = torch.where(condition[:, 0, 0], first.pending, second.pending)

    def rows(new: Tensor, old: Tensor) -> Tensor:
        """An infinite layer may have gained columns."""
        return torch.where(condition, new, torch.nn.functional.pad(old, (0, new.shape[-1] - old.shape[-1])))

    return FastWeights(
        {site: rows(x, second.weights[site]) for site, x in first.weights.items()},
        {site: rows(x, second.momentum[site]) for site, x in first.momentum.items()},
        pending,
        first.entries,
    )


def align_entries(spec: MemorySpec, now: FastWeights, missing: Sequence[int]) -> FastWeights:
    """The entries of each row's real tokens at the end, without the expired ones."""
    entries = now.entries
    if entries is None or not spec.cached_sites:
        return now

    def aligned(x: Tensor) -> Tensor:
        return align_tokens(x, entries.pairs, missing, spec.horizon)

    weights = {site: aligned(now.weights[site].mT).mT for site in spec.feature_sites}
    return now._replace(weights={**now.weights, **weights}, entries=Entries(aligned(entries.keys), entries.pairs))


def retract_all(spec: MemorySpec, now: FastWeights, where: Tensor | bool) -> tuple[FastWeights, dict[str, Tensor]]:
    """Fast weights and momentum drawn back into their ball, in the rows (R, 1, 1) that are due; factors by name."""
    factors: dict[str, Tensor] = {}

    def back(leaf: str, site: str, x: Tensor) -> Tensor:
        name = f"{leaf}.{site}"
        drawn, factors[name] = retract_site(spec, site, x)
        if isinstance(where, bool):
            return drawn
        factors[name] = torch.where(where, factors[name], 1)
        return torch.where(where, drawn, x)

    weights = {site: back("weights", site, x) if site in spec.fast else x for site, x in now.weights.items()}
    momentum = {site: back("momentum", site, x) for site, x in now.momentum.items()}
    return now._replace(weights=weights, momentum=momentum), factors
