"""The weights a memory starts reading with.

Shapes: H heads, D key width, F features, R pairs of a layer that sees wide features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from atlas_memory.ops.call import without_autocast
from atlas_memory.ops.features import feature_map
from atlas_memory.ops.stability import normalise
from atlas_memory.spec import MemorySpec

# Initial weights of layers that see more features than this are made of a few (key, vector) pairs; and of how many.
WIDEST_FULL_INITIAL = 128
RANK = 64


class InitialWeights(nn.Module):
    """The weights a memory starts reading with: {site: (H, out, in)}, slow parameters like any other.

    A matrix memory starts empty, as published. Deep ones start as random networks that give hidden units unit variance,
    and say nothing: what a network says before it was written to is louder than the first facts, and gates that are
    learned then close (docs/findings.md). Where the features are wide, the first layer is that of a few (key, vector)
    pairs, as that of an infinite one is: features of learned keys, which cost thousands of parameters, not millions.
    A polynomial's constant, the same for all keys, drops out of it.
    """

    def __init__(self, spec: MemorySpec, heads: int, rank: int = RANK) -> None:
        super().__init__()
        self.spec, self.heads = spec, heads
        self.full = nn.ParameterDict()
        self.keys, self.vectors = nn.ParameterDict(), nn.ParameterDict()
        if spec.network == "matrix":
            return
        if spec.kernel:
            self.full["pairs"] = nn.Parameter(torch.randn(heads, spec.initial_pairs, spec.key_width))
        for site, (rows, columns) in spec.site_shapes().items():
            if site == "down":
                self.full[site] = nn.Parameter(torch.zeros(heads, rows, columns))
            elif columns <= WIDEST_FULL_INITIAL or spec.kernel:  # whose columns are pairs already
                self.full[site] = nn.Parameter(torch.randn(heads, rows, columns))
            else:
                self.keys[site] = nn.Parameter(torch.randn(heads, rank, spec.key_width))
                vectors = torch.randn(heads, rows, rank) / math.sqrt(rank)
                # Squares have a mean, which all keys would share: it drops out of vectors that sum to zero.
                self.vectors[site] = nn.Parameter(vectors - vectors.mean(-1, keepdim=True) if rank > 1 else vectors)

    def forward(self) -> dict[str, Tensor] | None:
        if self.spec.network == "matrix":
            return None
        some = next(iter(self.full.values()))
        with without_autocast(some):  # they are read with in the working precision
            weights = {site: vectors @ self._features(self.keys[site]) for site, vectors in self.vectors.items()}
            weights |= dict(self.full.items())  # compilers take no ParameterDict for a mapping
        if self.spec.kernel:  # keys, like any other
            weights["pairs"] = normalise(weights["pairs"])
        return weights

    def _features(self, keys: Tensor) -> Tensor:
        """Of keys (H, R, D) as long as random ones: entries (H, R, F) of unit variance, whatever their degree."""
        keys = normalise(keys) * math.sqrt(self.spec.key_width)
        return feature_map(self.spec, None, keys).expand(keys)
