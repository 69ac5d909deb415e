"""The definition of the memory, token by token, with inner gradients by autograd. Slow, and the truth.

    S_t = θ_t S_{t−1} + η_t Σ_{j<c} γ_tj ∇_{t−j}     W_t = α_t W_{t−1} − S_t                       eq. 10–13
    S_t = θ_t S_{t−1} +     Σ_{j<c} γ_tj ∇_{t−j}     W_t = α_t W_{t−1} − [update point] η̄_t NS(S_t)  eq. 32–33
    y_t = M(φ(q_t); W_t)

All ∇ are taken at the anchor, the state that ended the chunk before (eq. 16). The write limiter ℓ_t scales what the
chunk has gathered so far, so it is written with the sums since the anchor:

    W_t = a_t W − σ_t S − ℓ_t Σ_i P_ti ∇_i           S_t = τ_t S + ℓ_t Σ_i B_ti ∇_i

Every row is read alone: a batch is a list. An infinite first layer (φ*) is a sum over entries, W φ*(x) = V z(x) with
z(x) = κ(x, keys of the entries): its gradient δ ⊗ φ*(k) is δ in the column of V that belongs to the token.

Shapes: H heads, N tokens seen by the chunk (window and chunk), E entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_memory.ops.call import Call, prepare, without_autocast
from atlas_memory.ops.entries import Entries, join_entries, kernel_features, retract_site, split_entries
from atlas_memory.ops.fast_weights import FastWeights
from atlas_memory.ops.networks import memory_network
from atlas_memory.ops.newton_schulz import newton_schulz
from atlas_memory.ops.optimizers import Gates
from atlas_memory.ops.sites import Dense
from atlas_memory.ops.stability import (
    safe_norm,
    shrink_factor,
    squared_norm_bound,
    step_limit,
    surprise_weighted,
    write_limit,
)
from atlas_memory.ops.state import MemoryState
from atlas_memory.spec import MemorySpec


class Token(NamedTuple):
    """One token of one row. A query of None: the token was answered in an earlier call."""

    key: Tensor  # (H, D)
    value: Tensor  # (H, V)
    retention: Tensor  # α (H,)
    momentum: Tensor  # θ (H,)
    step: Tensor  # η (H,)
    window: Tensor  # γ (H, W)
    query: Tensor | None


def memorize_reference(
    spec: MemorySpec,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    gates: Gates = Gates(),  # noqa: B008
    initial: Mapping[str, Tensor] | None = None,
    *,
    state: MemoryState | None = None,
    coefficients: Tensor | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    check_finite: bool | None = None,
) -> tuple[Tensor, MemoryState]:
    """As `memorize`, by the definition."""
    with without_autocast(keys):
        call = prepare(spec, queries, keys, values, gates, initial, state, coefficients, lengths, check_finite)
        rows = [_read_row(call, row) for row in range(call.keys.shape[0])]
    return torch.stack([outputs for outputs, _ in rows]), MemoryState.cat([state for _, state in rows])


def _read_row(call: Call, row: int) -> tuple[Tensor, MemoryState]:
    spec, before = call.spec, call.state.select([row])
    fill, position = before.fill[0], before.position[0]
    start = position - fill  # the anchor's place in the sequence
    window = _window_tokens(before, min(start, spec.window - 1))
    tokens = _open_tokens(spec, before, fill) + _new_tokens(call, row)
    now = FastWeights(
        {site: weight[0] for site, weight in before.group("weights").items()},
        {site: momentum[0] for site, momentum in before.group("momentum").items()},
        before.tensors["pending"][0] if "pending" in before.tensors else None,
    )
    if spec.kernel:
        entries, columns = join_entries(before)
        now = now._replace(weights={**now.weights, **columns}, entries=entries)
    outputs, size = list[Tensor](), spec.anchor_chunk
    while tokens:
        chunk = tokens[:size]
        answers, end = _read_chunk(call, now, window, chunk, start)
        outputs += answers
        if len(chunk) < size:
            break
        tokens, start = tokens[size:], start + size
        window = (window + chunk)[-(spec.window - 1) :] if spec.window > 1 else []
        now = _retract(spec, end) if spec.retracts and start % spec.chunk == 0 else end
        now = _without_expired(spec, now)
    y = torch.stack(outputs) if outputs else call.values.new_zeros(0, *call.values.shape[2:])
    padding = y.new_zeros(call.keys.shape[1] - y.shape[0], *y.shape[1:])
    return torch.cat([y, padding]), _state_of(before, now, window, tokens, position + call.lengths[row])


def _read_chunk(
    call: Call, anchor: FastWeights, window: list[Token], tokens: list[Token], start: int
) -> tuple[list[Tensor], FastWeights]:
    """Read the tokens of one chunk, which starts at place `start`: answers, and the state after the last token."""
    spec, network = call.spec, memory_network(call.spec)
    anchor = _with_room(spec, anchor, tokens)
    seen, gradients, decays = list(window), list[dict[str, Tensor]](), list[Tensor]()
    none = torch.zeros_like(tokens[0].step)
    writes, gathers = [none] * len(seen), [none] * len(seen)  # P_t, B_t
    weight, crossing, momentum = none + 1, none, none + 1  # a_t, σ_t, τ_t
    answers, now = list[Tensor](), anchor
    for place, token in enumerate(tokens, start):
        seen.append(token)
        writes, gathers = [*writes, none], [*gathers, none]
        alpha = token.retention
        for new in seen[len(gradients) :]:  # this token; at the chunk's start, also those in its window
            decays.append(weight * alpha if spec.gradient_at == "decayed" else none + 1)
            column = len(gradients) - len(window) - len(tokens)  # from the end: the chunk's tokens are the last entries
            gradient = _gradient(call, anchor, new, decays[-1], column)
            surprise = _surprise(call, gradient, new)
            gradients.append(gradient if spec.write_cap is None else _capped(gradient, surprise, spec.write_cap))
        if spec.surprise_retention is not None:
            alpha = surprise_weighted(alpha, surprise, spec.surprise_retention)

        step = torch.ones_like(token.step) if spec.optimizer == "muon" else token.step
        offsets = range(len(seen) - 1, -1, -1)
        impulses = [step * token.window[:, j] if j < spec.window else none for j in offsets]
        gathers = [token.momentum * b + impulse for b, impulse in zip(gathers, impulses, strict=True)]
        writes = [alpha * p + b for p, b in zip(writes, gathers, strict=True)]
        weight, momentum = alpha * weight, token.momentum * momentum
        crossing = alpha * crossing + momentum

        if spec.optimizer == "muon":
            now = _muon_step(call, now, anchor, seen, decays, gradients, gathers, momentum, alpha, token.step, place)
        else:
            limits = _limits(call, anchor, seen, decays, writes, gathers, crossing)
            now = _linear_step(anchor, gradients, writes, gathers, weight, crossing, momentum, limits)
        if token.query is not None:
            features, raw = _features(call, now, token.query[:, None], place - start)
            answer = network.forward(Dense(now.weights), features, raw)
            answers.append((answer / features.sum(-1, keepdim=True) if spec.normalised else answer)[:, 0])
    return answers, now


def _features(call: Call, now: FastWeights, x: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """φ(x), or z(x), and x (H, Q, D). place: of the token whose state is read, in its chunk; −1: the anchor."""
    if now.entries is None:
        return call.feature.expand(x), x
    places = torch.full((x.shape[1],), place, device=x.device)
    return kernel_features(call.feature, now.entries, x, places, call.spec.horizon), x


def _with_room(spec: MemorySpec, anchor: FastWeights, tokens: list[Token]) -> FastWeights:
    """The anchor with empty entries for the tokens of a chunk."""
    if anchor.entries is None or not spec.cached_sites:
        return anchor
    keys = torch.cat([anchor.entries.keys, torch.stack([token.key for token in tokens], dim=1)], dim=1)
    room = {site: torch.nn.functional.pad(anchor.weights[site], (0, len(tokens))) for site in spec.feature_sites}
    return anchor._replace(weights={**anchor.weights, **room}, entries=Entries(keys, anchor.entries.pairs, len(tokens)))


def _without_expired(spec: MemorySpec, now: FastWeights) -> FastWeights:
    """At a chunk's end: its tokens are entries like any other, and the oldest are gone."""
    entries = now.entries
    if entries is None:
        return now
    count = entries.tokens if spec.horizon is None else min(spec.horizon, entries.tokens)
    keep = [*range(entries.pairs), *range(entries.keys.shape[1] - count, entries.keys.shape[1])]
    weights = {site: now.weights[site][..., keep] for site in spec.feature_sites}
    return now._replace(weights={**now.weights, **weights}, entries=Entries(entries.keys[:, keep], entries.pairs))


class _Probe:
    """Weights, and a vector added to what some layers give: the gradient with respect to it is δ."""

    def __init__(self, weights: Mapping[str, Tensor], offsets: Mapping[str, Tensor]) -> None:
        self.reader, self.offsets = Dense(weights), offsets

    def read(self, site: str, x: Tensor) -> Tensor:
        read = self.reader.read(site, x)
        return read + self.offsets[site] if site in self.offsets else read

    def back(self, site: str, delta: Tensor) -> Tensor:
        raise TypeError("gradients come from autograd here")


def _gradient(call: Call, anchor: FastWeights, token: Token, decay: Tensor, column: int) -> dict[str, Tensor]:
    """∇ℓ of one token with respect to the fast layers, at the anchor scaled by `decay` (H,).

    column: the token's own in an infinite layer.
    """
    spec, network = call.spec, memory_network(call.spec)
    features, raw = _features(call, anchor, token.key[:, None], -1)
    at = {site: weight * decay[:, None, None] for site, weight in anchor.weights.items()}

    def loss(fast: dict[str, Tensor], offsets: dict[str, Tensor]) -> Tensor:
        prediction = network.forward(_Probe({**at, **fast}, offsets), features, raw)[:, 0]
        if spec.objective == "dot":
            return -(prediction * token.value).sum()
        return 0.5 * (prediction - token.value).square().sum()

    dense = {site: at[site] for site in spec.fast if site not in spec.cached_sites}
    none = {site: at[site].new_zeros(at[site].shape[0], 1, at[site].shape[1]) for site in spec.cached_sites}
    gradient, deltas = torch.func.grad(loss, argnums=(0, 1))(dense, none)
    for site, delta in deltas.items():
        own = torch.zeros_like(at[site][0, 0])
        own[column] = 1
        gradient[site] = delta.mT * own
    return {site: gradient[site] for site in spec.fast}


def _surprise(call: Call, gradient: dict[str, Tensor], token: Token) -> Tensor:
    """‖∇ℓ‖ over all fast layers (H,)."""
    length = {site: call.feature.norm(token.key) for site in call.spec.cached_sites}  # of φ*(k), whose column is 1
    parts = [part.flatten(1) * length.get(site, 1) for site, part in gradient.items()]
    return safe_norm(torch.cat(parts, dim=1), -1)[:, 0]


def _capped(gradient: dict[str, Tensor], surprise: Tensor, limit: float) -> dict[str, Tensor]:
    factor = shrink_factor(surprise, limit)[:, None, None]
    return {site: part * factor for site, part in gradient.items()}


def _sum(coefficients: list[Tensor], gradients: list[dict[str, Tensor]], site: str) -> Tensor:
    terms = [c[:, None, None] * gradient[site] for c, gradient in zip(coefficients, gradients, strict=True)]
    return torch.stack(terms).sum(0)


def _linear_step(
    anchor: FastWeights,
    gradients: list[dict[str, Tensor]],
    writes: list[Tensor],
    gathers: list[Tensor],
    weight: Tensor,
    crossing: Tensor,
    momentum: Tensor,
    limits: dict[str, Tensor],
) -> FastWeights:
    """W_t = a W − σ S − ℓ Σ P ∇,  S_t = τ S + ℓ Σ B ∇."""
    a, sigma, tau = (x[:, None, None] for x in (weight, crossing, momentum))
    weights, momenta = dict(anchor.weights), dict(anchor.momentum)
    for site in gradients[0]:
        carried = anchor.momentum.get(site, torch.zeros_like(weights[site]))
        limit = limits[site][:, None, None] if site in limits else 1
        weights[site] = a * weights[site] - sigma * carried - limit * _sum(writes, gradients, site)
        if site in momenta:
            momenta[site] = tau * carried + limit * _sum(gathers, gradients, site)
    return anchor._replace(weights=weights, momentum=momenta)


def _muon_step(
    call: Call,
    now: FastWeights,
    anchor: FastWeights,
    seen: list[Token],
    decays: list[Tensor],
    gradients: list[dict[str, Tensor]],
    gathers: list[Tensor],
    momentum: Tensor,
    alpha: Tensor,
    eta: Tensor,
    place: int,
) -> FastWeights:
    """S_t = τ S + Σ B ∇;  W_t = α W_{t−1} − η̄ NS(S_t) at update points, counted from the sequence's own start."""
    assert now.pending is not None
    spec = call.spec
    pending = alpha * now.pending + eta  # η̄
    is_update = place % spec.interval == spec.interval - 1
    weights, momenta = dict(now.weights), dict(now.momentum)
    for site in gradients[0]:
        momenta[site] = momentum[:, None, None] * anchor.momentum[site] + _sum(gathers, gradients, site)
        weights[site] = alpha[:, None, None] * now.weights[site]
        if is_update:
            step = newton_schulz(momenta[site], spec.newton_schulz_steps, spec.momentum_floor)
            if spec.limits_writes:
                inputs, sensitivity, curvature = _bound_terms(call, anchor, seen, decays)[site]
                loss_weights = torch.stack(gathers, dim=-1) * sensitivity.square()
                arguments = pending[:, None], step[:, None], momenta[site][:, None], inputs, loss_weights[:, None]
                step = step * step_limit(*arguments, curvature)[..., None]
            weights[site] = weights[site] - pending[:, None, None] * step
    return FastWeights(weights, momenta, torch.zeros_like(pending) if is_update else pending)


def _limits(
    call: Call,
    anchor: FastWeights,
    seen: list[Token],
    decays: list[Tensor],
    writes: list[Tensor],
    gathers: list[Tensor],
    crossing: Tensor,
) -> dict[str, Tensor]:
    """ℓ_t of every fast layer (H,)."""
    if not call.spec.limits_writes:
        return {}
    step = torch.stack([p + crossing * b for p, b in zip(writes, gathers, strict=True)], dim=-1)[:, None]
    limits = {}
    for site, (inputs, sensitivity, curvature) in _bound_terms(call, anchor, seen, decays).items():
        products = call.feature.inner(inputs, inputs) if site in call.spec.cached_sites else inputs @ inputs.mT
        gram = products.abs() * sensitivity[:, :, None] * sensitivity[:, None, :]
        limits[site] = write_limit(step, (step > 0).to(step.dtype), gram, curvature)[:, 0]
    return limits


def _bound_terms(
    call: Call, anchor: FastWeights, seen: list[Token], decays: list[Tensor]
) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Per fast layer: its inputs (H, N, in), their sensitivities (H, N), and the curvature above it (H, 1)."""
    spec, network = call.spec, memory_network(call.spec)
    keys = torch.stack([token.key for token in seen], dim=1)  # (H, N, D)
    reader = Dense(anchor.weights, torch.stack(decays, dim=1)[..., None])
    features, _ = _features(call, anchor, keys, -1)
    _, factors = network.factors(reader, features, keys, lambda prediction: prediction)
    above = network.curvature * squared_norm_bound(anchor.weights["down"])
    terms = {}
    for site in spec.fast:
        inputs, _, sensitivity = factors[site]
        inputs = keys if site in spec.cached_sites else inputs
        sensitivity = torch.ones_like(inputs[..., 0]) if sensitivity is None else sensitivity
        terms[site] = (inputs, sensitivity, None if site == "down" else above)
    return terms


def _retract(spec: MemorySpec, now: FastWeights) -> FastWeights:
    def back(site: str, x: Tensor) -> Tensor:
        return retract_site(spec, site, x)[0]

    weights = {site: back(site, w) if site in spec.fast else w for site, w in now.weights.items()}
    return now._replace(weights=weights, momentum={site: back(site, s) for site, s in now.momentum.items()})


def _token(spec: MemorySpec, parts: Mapping[str, Tensor], place: int, query: Tensor | None) -> Token:
    """One token of parts {name: (T, H, ...)}; gates that are absent become their constants."""
    key = parts["keys"][place]
    none = key.new_zeros(key.shape[0])

    def gate(name: str, constant: float) -> Tensor:
        return parts[name][place] if name in parts else none + constant

    window = parts["window"][place] if "window" in parts else none[:, None].expand(-1, spec.window) + 1
    return Token(key, parts["values"][place], gate("retention", 1), gate("momentum", 0), gate("step", 1), window, query)


def _new_tokens(call: Call, row: int) -> list[Token]:
    parts = {"keys": call.keys[row], "values": call.values[row]}
    parts |= {name: gate[row] for name, gate in call.gates._asdict().items() if gate is not None}
    return [_token(call.spec, parts, t, call.queries[row, t]) for t in range(call.lengths[row])]


def _open_tokens(spec: MemorySpec, state: MemoryState, fill: int) -> list[Token]:
    parts = {name: buffer[0] for name, buffer in state.group("open").items()}
    return [_token(spec, parts, spec.chunk - 1 - fill + i, None) for i in range(fill)]


def _window_tokens(state: MemoryState, count: int) -> list[Token]:
    parts = {name: state.window(name)[0] for name in ("keys", "values")}
    return [_token(state.spec, parts, state.spec.window - 1 - count + i, None) for i in range(count)]


def _state_of(
    before: MemoryState, now: FastWeights, window: list[Token], open_chunk: list[Token], position: int
) -> MemoryState:
    tensors = {f"weights.{site}": weight[None] for site, weight in now.weights.items()}
    if now.entries is not None:
        sites = before.spec.feature_sites
        tensors |= {f"weights.{site}": now.weights[site][None, ..., : now.entries.pairs] for site in sites}
        tensors |= split_entries(now.weights, now.entries, before.spec.cached_sites, 1)
    tensors |= {f"momentum.{site}": momentum[None] for site, momentum in now.momentum.items()}
    if now.pending is not None:
        tensors["pending"] = now.pending[None]
    names = {"keys": "key", "values": "value"}
    for prefix, tokens in (("window", window), ("open", open_chunk)):
        for name, buffer in before.group(prefix).items():
            filled = [getattr(token, names.get(name, name)) for token in tokens]
            empty = buffer.new_zeros(buffer.shape[1] - len(filled), *buffer.shape[2:])
            tensors[f"{prefix}.{name}"] = torch.cat([empty, torch.stack(filled)] if filled else [empty])[None]
    return before.updated(tensors, [position])
