"""What holds a fast layer, seen by keys and by queries.

    Dense     plain weights; keys read the anchor through it, each at its own decay
    Linear    queries read a·xWᵀ − σ·xSᵀ − ℓ (P ⊙ κ(x, x_k)) δ          gd, momentum
    Muon      queries read the weights of the last update point before them

`fold` gives the weights a chunk leaves behind. Shapes: R rows (batch × heads), C tokens of the chunk, N tokens whose
gradients it uses, Q queries (the chunk's last Q tokens), K update points.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atlas_memory.ops.dense import fold_dense, read_dense
from atlas_memory.ops.entries import Entries, append_columns, of_tokens
from atlas_memory.ops.fast_weights import FastWeights
from atlas_memory.ops.networks import Factors
from atlas_memory.ops.newton_schulz import newton_schulz
from atlas_memory.ops.optimizers import Coefficients, MuonCoefficients
from atlas_memory.ops.stability import may_look, step_limit


class Dense:
    """Plain weights {site: (R, out, in)}, optionally scaled per token: `decay` (R, N, 1)."""

    def __init__(self, weights: Mapping[str, Tensor], decay: Tensor | None = None) -> None:
        self.weights, self.decay = weights, decay

    def read(self, site: str, x: Tensor) -> Tensor:
        return self._decayed(x @ self.weights[site].mT)

    def back(self, site: str, delta: Tensor) -> Tensor:
        return self._decayed(delta @ self.weights[site])

    def _decayed(self, x: Tensor) -> Tensor:
        return x if self.decay is None else x * self.decay


class Linear:
    """A chunk of gradient descent, with or without momentum. No token's weights are ever built."""

    def __init__(
        self,
        anchor: FastWeights,
        factors: Mapping[str, Factors],
        coefficients: Coefficients,
        limits: Mapping[str, Tensor],
        kernels: Mapping[str, Tensor],
        keys: Tensor,
        impulses: int = 1,
    ) -> None:
        """factors: of the fast sites. limits: {site: ℓ (R, C)}, empty where the limiter is off. kernels: {site:
        κ(queries, keys) (R, Q, N)} of the sites that see features; at the others it is the inner product. keys
        (R, N, D): of the tokens, for the entries they become in an infinite layer. impulses: factors per token."""
        self.anchor, self.factors, self.coefficients, self.limits = anchor, factors, coefficients, limits
        self.kernels, self.keys, self.impulses = kernels, keys, impulses

    def read(self, site: str, x: Tensor) -> Tensor:
        weight = self.anchor.weights[site]
        if site not in self.factors:  # a layer that does not learn while reading
            return torch.bmm(x, weight.mT)
        inputs, deltas, _ = self.factors[site]
        coefficients = self.coefficients
        rows = slice(coefficients.weight.shape[1] - x.shape[1], None)
        kernel = self.kernels[site] if site in self.kernels else torch.bmm(x, inputs.mT)
        mixing = kernel * self._limited(site, coefficients.writes[:, rows], rows)
        crossing = None if coefficients.crossing is None else coefficients.crossing[:, rows]
        momentum = self.anchor.momentum.get(site)
        return read_dense(x, weight, momentum, coefficients.weight[:, rows], crossing, mixing, deltas)

    def _limited(self, site: str, coefficients: Tensor, rows: slice) -> Tensor:
        return coefficients * self.limits[site][:, rows, None] if site in self.limits else coefficients

    def back(self, site: str, delta: Tensor) -> Tensor:
        raise TypeError("queries are only read")

    def fold(self, last: Tensor | int) -> FastWeights:
        """The weights and momentum at token `last` of the chunk: one for all rows, or one each (R,)."""
        weights, momentum = dict(self.anchor.weights), dict(self.anchor.momentum)
        rows = self.coefficients.map(lambda leaf: at_token(leaf, last))
        for site, (inputs, deltas, _) in self.factors.items():
            limit = at_token(self.limits[site], last)[:, None] if site in self.limits else 1
            weight, carried = self.anchor.weights[site], self.anchor.momentum.get(site)
            if self.anchor.entries is not None and site in self.kernels:
                contributions = (-limit * rows.writes)[..., None] * deltas
                weights[site] = self._with_columns(weight, rows.weight, contributions)
                continue
            crossing = None if rows.crossing is None else -rows.crossing
            weights[site] = fold_dense(weight, rows.weight, carried, crossing, -limit * rows.writes, deltas, inputs)
            if carried is not None and rows.momentum is not None and rows.gathers is not None:
                momentum[site] = fold_dense(carried, rows.momentum, None, None, limit * rows.gathers, deltas, inputs)
        return FastWeights(weights, momentum, entries=self._with_entries(weights))

    def _with_columns(self, weight: Tensor, scale: Tensor, contributions: Tensor) -> Tensor:
        entries = self.anchor.entries
        assert entries is not None
        tokens, size = self.keys.shape[1], self.coefficients.weight.shape[1]
        contributions = of_tokens(contributions, self.impulses)
        overlap = min(tokens - size, entries.tokens)
        return append_columns(weight, scale, contributions[:, tokens - size - overlap :], overlap)

    def _with_entries(self, weights: dict[str, Tensor]) -> Entries | None:
        """The entries with those of the chunk's own tokens; layers that do not learn get columns of zeros for them."""
        entries = self.anchor.entries
        if entries is None:
            return None
        if not any(site in self.factors for site in self.kernels):
            return entries
        new = self.keys[:, self.keys.shape[1] - self.coefficients.weight.shape[1] :]
        for site in self.kernels.keys() - self.factors.keys():
            weights[site] = torch.nn.functional.pad(weights[site], (0, new.shape[1]))
        return Entries(torch.cat([entries.keys, new], dim=1), entries.pairs)


class Muon:
    """A chunk with orthogonalised steps: builds the weights of its K update points, not of its tokens."""

    def __init__(
        self,
        anchor: FastWeights,
        factors: Mapping[str, Factors],
        coefficients: MuonCoefficients,
        update_points: range,
        steps: int,
        floor: float,
        curvatures: Mapping[str, Tensor | None],
    ) -> None:
        """curvatures: {site: (R, 1) or None} of the layers above, for the step limiter; empty where it is off."""
        self.anchor, self.factors, self.coefficients = anchor, factors, coefficients
        self.points, self.curvatures = update_points, curvatures
        self.limits: dict[str, Tensor] = {}  # {site: ℓ (R, K)}
        self.unmoved = _known_zero(coefficients.updates)
        self.steps = {site: self._steps(site, steps, floor) for site in factors} if update_points else {}
        self.stacks = {site: self._weights_at_points(site) for site in self.steps}

    def _steps(self, site: str, steps: int, floor: float) -> Tensor:
        """ℓ_u NS(S_u) (R, K, out, in) at every update point u; where none is taken, as if all were zero."""
        if self.unmoved:
            weight = self.anchor.weights[site]
            return weight.new_zeros(weight.shape[0], len(self.points), *weight.shape[1:])
        inputs, deltas, sensitivity = self.factors[site]
        gathers = self._at_points(self.coefficients.gathers)  # (R, K, N)
        kept = self._at_points(self.coefficients.momentum)[..., None, None] * self.anchor.momentum[site][:, None]
        gathered = kept + (gathers[..., None] * deltas[:, None]).mT @ inputs[:, None]
        step = newton_schulz(gathered, steps, floor)
        if site not in self.curvatures:
            return step
        size = self._at_points(self.coefficients.updates).diagonal(dim1=1, dim2=2)
        weights = gathers if sensitivity is None else gathers * sensitivity.square()[:, None]
        self.limits[site] = step_limit(size, step, gathered, inputs, weights, self.curvatures[site])
        return step * self.limits[site][..., None, None]

    def token_limits(self) -> dict[str, Tensor]:
        """{site: ℓ (R, C)}: 1 but at update points."""
        every = torch.ones_like(self.coefficients.weight)
        first, interval = self.points.start, self.points.step
        acting = {
            site: every.slice_scatter(limit, 1, start=first, step=interval) for site, limit in self.limits.items()
        }
        return acting or dict.fromkeys(self.curvatures, every)

    def _at_points(self, x: Tensor) -> Tensor:
        """(R, C, ...) → (R, K, ...)."""
        return x[:, self.points.start :: self.points.step]

    def _weights_at_points(self, site: str) -> Tensor:
        """W_u (R, K, out, in) just after every update point."""
        decayed = self._at_points(self.coefficients.weight)[..., None, None] * self.anchor.weights[site][:, None]
        moves = self._at_points(self.coefficients.updates)  # (R, K, K)
        return decayed - (moves @ self.steps[site].flatten(2)).view_as(decayed)

    def read(self, site: str, x: Tensor) -> Tensor:
        """Tokens between two update points share weights, but for the decay since: groups of tokens, a product each."""
        weight = self.anchor.weights[site]
        if site not in self.factors:
            return torch.bmm(x, weight.mT)
        start = self.coefficients.weight.shape[1] - x.shape[1]
        since = self.coefficients.since[:, start:, None]
        if not self.points or start >= self.points[-1]:
            last = self.stacks[site][:, -1] if self.points else weight
            return torch.bmm(x, last.mT) * since
        first_end = max(self.points[0] - start, 0)
        last_start = self.points[-1] - start
        parts = [torch.bmm(x[:, :first_end], weight.mT)]
        if len(self.points) > 1:
            parts.append(self._read_between(site, x[:, first_end:last_start]))
        parts.append(torch.bmm(x[:, last_start:], self.stacks[site][:, -1].mT))
        return torch.cat(parts, dim=1) * since

    def _read_between(self, site: str, x: Tensor) -> Tensor:
        """Tokens from the first update point to before the last: whole intervals, but for a late first query."""
        interval = self.points[1] - self.points[0]
        whole = (len(self.points) - 1) * interval
        missing = whole - x.shape[1]
        groups = torch.nn.functional.pad(x, (0, 0, missing, 0)).unflatten(1, (-1, interval))
        return (groups @ self.stacks[site][:, :-1].mT).flatten(1, 2)[:, missing:]

    def back(self, site: str, delta: Tensor) -> Tensor:
        raise TypeError("queries are only read")

    def fold(self, last: Tensor | int) -> FastWeights:
        """The weights, momentum and pending step at token `last` of the chunk: one for all rows, or one each (R,)."""
        weights, momentum = dict(self.anchor.weights), dict(self.anchor.momentum)
        decay = at_token(self.coefficients.weight, last)[:, None, None]
        for site, (inputs, deltas, _) in self.factors.items():
            weights[site] = self.anchor.weights[site] * decay
            if self.points:
                moves = at_token(self.coefficients.updates, last)[:, None]
                weights[site] = weights[site] - (moves @ self.steps[site].flatten(2)).view_as(weights[site])
            gathers, kept = at_token(self.coefficients.gathers, last), at_token(self.coefficients.momentum, last)
            momentum[site] = fold_dense(self.anchor.momentum[site], kept, None, None, gathers, deltas, inputs)
        return FastWeights(weights, momentum, at_token(self.coefficients.pending, last))


def _known_zero(x: Tensor) -> bool:
    """Whether all entries are zero, and nobody will ask for their gradients."""
    return not torch.is_grad_enabled() and may_look(x) and not bool(x.any())


def at_token(x: Tensor, token: Tensor | int) -> Tensor:
    """Row `token` of x (R, C, ...): the same for all rows, or one each (R,)."""
    if isinstance(token, int):
        return x[:, token]
    return x[torch.arange(x.shape[0], device=x.device), token]
