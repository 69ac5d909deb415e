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

from atlas_memory.ops.dense import fold_dense, move_dense, read_dense
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
        return self._decayed(through(x, self.weights[site]))

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
            return through(x, weight)
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
        at = self.coefficients.map(lambda leaf: at_token(leaf, last)[:, None])
        for site, (inputs, deltas, _) in self.factors.items():
            limit = at_token(self.limits[site], last)[:, None, None] if site in self.limits else 1
            weight, carried, writes = self.anchor.weights[site], self.anchor.momentum.get(site), -limit * at.writes
            if self.anchor.entries is not None and site in self.kernels:
                weights[site] = self._with_columns(weight, at.weight[:, 0], writes[:, 0, :, None] * deltas)
                continue
            crossing = None if at.crossing is None else -at.crossing
            weights[site] = fold_dense(weight, at.weight, carried, crossing, writes, deltas, inputs).squeeze(1)
            if carried is not None and at.momentum is not None and at.gathers is not None:
                gathers = limit * at.gathers
                momentum[site] = fold_dense(carried, at.momentum, None, None, gathers, deltas, inputs).squeeze(1)
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
        acting = factors if update_points else {}
        at_points = coefficients.map(self._at_points)
        self.gathered = {site: self._momentum_at(site, at_points.momentum, at_points.gathers) for site in acting}
        self.steps = {} if self.unmoved else {site: self._steps(site, at_points, steps, floor) for site in acting}
        self.stacks = {site: self._weights_at(site, at_points.weight, at_points.updates) for site in acting}

    def _momentum_at(self, site: str, decay: Tensor, gathers: Tensor) -> Tensor:
        """τ S + Σ_i B_i ∇_i (R, Q, out, in) at Q tokens: decay τ (R, Q), gathers B (R, Q, N)."""
        inputs, deltas, _ = self.factors[site]
        return fold_dense(self.anchor.momentum[site], decay, None, None, gathers, deltas, inputs)

    def _steps(self, site: str, at_points: MuonCoefficients, steps: int, floor: float) -> Tensor:
        """NS(S_u) (R, K, out, in) at every update point u, and what limits them."""
        gathered = self.gathered[site]
        step = newton_schulz(gathered, steps, floor)
        if site in self.curvatures:
            inputs, _, sensitivity = self.factors[site]
            size, weights = at_points.updates.diagonal(dim1=1, dim2=2), at_points.gathers
            weights = weights if sensitivity is None else weights * sensitivity.square()[:, None]
            self.limits[site] = step_limit(size, step, gathered, inputs, weights, self.curvatures[site])
        return step

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

    def _weights_at(self, site: str, decay: Tensor, updates: Tensor) -> Tensor:
        """a W − Σ_u D_u ℓ_u NS(S_u) (R, Q, out, in) at Q tokens: decay a (R, Q), updates D (R, Q, K)."""
        if site not in self.steps:
            return decay[..., None, None] * self.anchor.weights[site][:, None]
        moves = updates * self.limits[site][:, None] if site in self.limits else updates
        return move_dense(self.anchor.weights[site], decay, self.steps[site], moves)

    def read(self, site: str, x: Tensor) -> Tensor:
        """Tokens between two update points share weights, but for the decay since: groups of tokens, a product each."""
        weight = self.anchor.weights[site]
        if site not in self.factors:
            return through(x, weight)
        start = self.coefficients.weight.shape[1] - x.shape[1]
        since = self.coefficients.since[:, start:, None]
        if not self.points or start >= self.points[-1]:
            last = _newest(self.stacks[site]) if self.points else weight
            return through(x, last) * since
        first_end = max(self.points[0] - start, 0)
        last_start = self.points[-1] - start
        parts = [through(x[:, :first_end], weight)]
        if len(self.points) > 1:
            parts.append(self._read_between(site, x[:, first_end:last_start]))
        parts.append(through(x[:, last_start:], _newest(self.stacks[site])))
        return torch.cat(parts, dim=1) * since

    def _read_between(self, site: str, x: Tensor) -> Tensor:
        """Tokens from the first update point to before the last: whole intervals, but for a late first query."""
        interval = self.points[1] - self.points[0]
        whole = (len(self.points) - 1) * interval
        missing = whole - x.shape[1]
        groups = torch.nn.functional.pad(x, (0, 0, missing, 0)).unflatten(1, (-1, interval))
        return through(groups, self.stacks[site][:, :-1]).flatten(1, 2)[:, missing:]

    def back(self, site: str, delta: Tensor) -> Tensor:
        raise TypeError("queries are only read")

    def fold(self, last: Tensor | int) -> FastWeights:
        """The weights, momentum and pending step at token `last` of the chunk: one for all rows, or one each (R,)."""
        weights, momentum = dict(self.anchor.weights), dict(self.anchor.momentum)
        if isinstance(last, int) and self.points and last == self.points[-1]:  # as a rule
            for site in self.factors:
                weights[site], momentum[site] = _kept(self.stacks[site]), _kept(self.gathered[site])
        else:
            at = self.coefficients.map(lambda leaf: at_token(leaf, last)[:, None])
            for site in self.factors:
                weights[site] = self._weights_at(site, at.weight, at.updates).squeeze(1)
                momentum[site] = self._momentum_at(site, at.momentum, at.gathers).squeeze(1)
        return FastWeights(weights, momentum, at_token(self.coefficients.pending, last))


def _newest(stack: Tensor) -> Tensor:
    """The last of K (R, K, ...); of one, without a copy backward."""
    return stack.flatten(0, 1) if stack.shape[1] == 1 else stack[:, -1]


def _kept(stack: Tensor) -> Tensor:
    """The same, copied out of many, which would live as long as it does."""
    return _newest(stack) if stack.shape[1] == 1 else _newest(stack).clone()


def through(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ (..., Q, out) of x (..., Q, in). In this order the gradient of W comes back as W lies, not transposed."""
    return (weight @ x.mT).mT


def _known_zero(x: Tensor) -> bool:
    """Whether all entries are zero, and nobody will ask for their gradients."""
    return not torch.is_grad_enabled() and may_look(x) and not bool(x.any())


def at_token(x: Tensor, token: Tensor | int) -> Tensor:
    """Row `token` of x (R, C, ...): the same for all rows, or one each (R,)."""
    if isinstance(token, int):
        return x[:, token]
    return x[torch.arange(x.shape[0], device=x.device), token]
