"""An infinite first layer, kept as entries: W φ*(x) = Σ_m vector_m κ(key_m, x).

Every gradient of the layer is δ ⊗ φ*(k), so its weights are a sum over entries, one for each token and a few learned
pairs to start from. Seen through the kernel features z(x) = κ(x, keys of all entries) the layer is a dense one, with
the vectors as the columns of its weight; only folding differs: a chunk adds columns where a dense layer adds products.

Shapes: R rows (batch × heads), P pairs, M tokens kept, E = P + M entries, C tokens of the chunk, N = C + W − 1 tokens
whose gradients it uses, D key width. Entries of rows that have read less are padded on the left, with vectors of zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from atlas_memory.ops.dense import retract
from atlas_memory.ops.features import Feature
from atlas_memory.ops.packing import take_rows
from atlas_memory.spec import MemorySpec

if TYPE_CHECKING:
    from atlas_memory.ops.state import MemoryState


class Entries(NamedTuple):
    """Keys (R, E, D) of the entries: of the pairs, of the tokens up to the anchor, and of some that are yet to come."""

    keys: Tensor
    pairs: int
    ahead: int = 0

    @property
    def tokens(self) -> int:
        return self.keys.shape[1] - self.pairs


def kernel_features(feature: Feature, entries: Entries, x: Tensor, places: Tensor, horizon: int | None) -> Tensor:
    """z(x) (R, Q, E) for x (R, Q, D), zero at entries that have expired.

    places (Q,): the token whose state each x reads, counted from the chunk's first one; −1 is the anchor.
    """
    z = feature.kernel(x, entries.keys)
    if horizon is None:
        return z
    places = places[:, None]
    ages = places - torch.arange(entries.tokens, device=x.device) + (entries.tokens - entries.ahead)  # (Q, M)
    alive = torch.cat([torch.ones_like(places, dtype=torch.bool).expand(-1, entries.pairs), ages < horizon], dim=1)
    return z * alive.to(z.dtype)


def unexpired(kernel: Tensor, places: Tensor, written: Tensor, horizon: int | None) -> Tensor:
    """A kernel (..., Q, N) inside the chunk, zero where a token `written` (N,) is too old for who reads at `places`."""
    if horizon is None:
        return kernel
    return kernel * (places[:, None] - written < horizon).to(kernel.dtype)


def of_tokens(contributions: Tensor, window: int) -> Tensor:
    """Sums of impulses (R, C·W, X), W of each token, offset 0 first → tokens (R, N, X)."""
    if window == 1:
        return contributions
    impulses = contributions.unflatten(1, (-1, window)).unbind(2)
    # token t − j stands at column t + W − 1 − j
    shifted = [torch.nn.functional.pad(x, (0, 0, window - 1 - j, j)) for j, x in enumerate(impulses)]
    return torch.stack(shifted).sum(0)


def append_columns(weight: Tensor, scale: Tensor, contributions: Tensor, overlap: int) -> Tensor:
    """The weight (R, out, E) scaled by `scale` (R,), with the chunk's contributions (R, N, out) in new columns.

    The window's tokens are entries already: the contributions of the last `overlap` of them are added to theirs.
    """
    old, new = weight * scale[:, None, None], contributions.mT
    if overlap == 0:
        return torch.cat([old, new], dim=-1)
    known = weight.shape[-1] - overlap
    return torch.cat([old[..., :known], old[..., known:] + new[..., :overlap], new[..., overlap:]], dim=-1)


def align_tokens(x: Tensor, pairs: int, missing: Sequence[int], keep: int | None) -> Tensor:
    """Entries x (R, E, X) with each row's last `missing` tokens taken away and the rest moved to the end.

    keep: the newest tokens to keep, None for all. missing: one number for each batch row, spread over its heads.
    """
    head, tokens = x[:, :pairs], x[:, pairs:]
    count = tokens.shape[1] if keep is None else min(keep, tokens.shape[1])
    if any(missing):
        per_row = [n for n in missing for _ in range(x.shape[0] // len(missing))]
        tokens = take_rows(tokens, [tokens.shape[1] - count - n for n in per_row], count)
    else:
        tokens = tokens[:, tokens.shape[1] - count :]
    return torch.cat([head, tokens], dim=1) if pairs else tokens


def retract_columns(weight: Tensor, root_mean_square: float) -> tuple[Tensor, Tensor]:
    """Every entry's vector drawn back into its own ball, as `retract` does a weight; the smallest factor (R, 1, 1)."""
    rows, width, count = weight.shape
    if count == 0:
        return weight, weight.new_ones(rows, 1, 1)
    drawn, factors = retract(weight.mT.reshape(rows * count, width, 1), root_mean_square)
    return drawn.reshape(rows, count, width).mT, factors.reshape(rows, 1, count).amin(-1, keepdim=True)


def retract_site(spec: MemorySpec, site: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The weight (R, out, in) of a site drawn back, entry by entry where it keeps one a token; and the factors."""
    assert spec.retraction is not None
    return (retract_columns if site in spec.cached_sites else retract)(x, spec.retraction)


def join_entries(state: MemoryState) -> tuple[Entries, dict[str, Tensor]]:
    """The entries of a state, and the weights {site: (R, out, E)} with a column for each."""
    pairs, keys = state.tensors["pairs"].flatten(0, 1), state.tensors.get("cache.keys")
    tokens = 0 if keys is None else keys.shape[1]
    weights = {}
    for site in state.spec.feature_sites:
        weight, vectors = state.tensors[f"weights.{site}"].flatten(0, 1), state.tensors.get(f"cache.{site}")
        if vectors is None:  # a layer that does not learn while reading
            weights[site] = torch.nn.functional.pad(weight, (0, tokens))
        else:
            weights[site] = torch.cat([weight, vectors.permute(0, 2, 3, 1).flatten(0, 1)], dim=-1)
    joined = pairs if keys is None else torch.cat([pairs, keys.movedim(2, 1).flatten(0, 1)], dim=1)
    return Entries(joined, pairs.shape[1]), weights


def split_entries(
    weights: Mapping[str, Tensor], entries: Entries, sites: Sequence[str], batch: int
) -> dict[str, Tensor]:
    """The leaves of a state that `join_entries` put together."""
    leaves = {"cache.keys": entries.keys, **{f"cache.{site}": weights[site].mT for site in sites}} if sites else {}
    return {name: x[:, entries.pairs :].unflatten(0, (batch, -1)).movedim(1, 2) for name, x in leaves.items()}
