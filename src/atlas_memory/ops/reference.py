"""The definition of the memory, token by token, with inner gradients by autograd. Slow, and the truth.

    S_t = θ_t S_{t−1} + η_t Σ_{j<c} γ_tj ∇_{t−j}     W_t = α_t W_{t−1} − S_t                       eq. 10–13
    S_t = θ_t S_{t−1} +     Σ_{j<c} γ_tj ∇_{t−j}     W_t = α_t W_{t−1} − [update point] η̄_t NS(S_t)  eq. 32–33
    y_t = M(φ(q_t); W_t)

All ∇ are taken at the anchor, the state that ended the chunk before (eq. 16). The write limiter ℓ_t scales what the
chunk has gathered so far, so it is written with the sums since the anchor:

    W_t = a_t W − σ_t S − ℓ_t Σ_i P_ti ∇_i           S_t = τ_t S + ℓ_t Σ_i B_ti ∇_i

Every row is read alone: a batch is a list. Shapes: H heads, N tokens seen by the chunk (window and chunk).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_memory.ops.call import Call, prepare
from atlas_memory.ops.dense import retract
from atlas_memory.ops.networks import memory_network
from atlas_memory.ops.newton_schulz import newton_schulz
from atlas_memory.ops.optimizers import Gates
from atlas_memory.ops.sites import Dense, FastWeights
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
    lengths: Sequence[int] | None = None,
    check_finite: bool | None = None,
) -> tuple[Tensor, MemoryState]:
    """As `memorize`, by the definition."""
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
    y = torch.stack(outputs) if outputs else call.values.new_zeros(0, *call.values.shape[2:])
    padding = y.new_zeros(call.keys.shape[1] - y.shape[0], *y.shape[1:])
    return torch.cat([y, padding]), _state_of(before, now, window, tokens, position + call.lengths[row])


def _read_chunk(
    call: Call, anchor: FastWeights, window: list[Token], tokens: list[Token], start: int
) -> tuple[list[Tensor], FastWeights]:
    """Read the tokens of one chunk, which starts at place `start`: answers, and the state after the last token."""
    spec, network = call.spec, memory_network(call.spec)
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
            gradient = _gradient(call, anchor, new, decays[-1])
            surprise = _surprise(gradient)
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
            reader = Dense(now.weights)
            answers.append(network.forward(reader, *_features(call, token.query))[:, 0])
    return answers, now


def _features(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    """φ(x) and x, as sequences of one token (H, 1, ...)."""
    return call.feature.expand(x)[:, None], x[:, None]


def _gradient(call: Call, anchor: FastWeights, token: Token, decay: Tensor) -> dict[str, Tensor]:
    """∇ℓ of one token with respect to the fast layers, at the anchor scaled by `decay` (H,)."""
    spec, network = call.spec, memory_network(call.spec)
    features, raw = _features(call, token.key)
    at = {site: weight * decay[:, None, None] for site, weight in anchor.weights.items()}

    def loss(fast: dict[str, Tensor]) -> Tensor:
        prediction = network.forward(Dense({**at, **fast}), features, raw)[:, 0]
        if spec.objective == "dot":
            return -(prediction * token.value).sum()
        return 0.5 * (prediction - token.value).square().sum()

    result: dict[str, Tensor] = torch.func.grad(loss)({site: at[site] for site in spec.fast})
    return result


def _surprise(gradient: dict[str, Tensor]) -> Tensor:
    """‖∇ℓ‖ over all fast layers (H,)."""
    return safe_norm(torch.cat([part.flatten(1) for part in gradient.values()], dim=1), -1)[:, 0]


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
    return FastWeights(weights, momenta)


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
            step = newton_schulz(momenta[site], spec.newton_schulz_steps)
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
        gram = (inputs @ inputs.mT).abs() * sensitivity[:, :, None] * sensitivity[:, None, :]
        limits[site] = write_limit(step, (step > 0).to(step.dtype), gram, curvature)[:, 0]
    return limits


def _bound_terms(
    call: Call, anchor: FastWeights, seen: list[Token], decays: list[Tensor]
) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Per fast layer: its inputs (H, N, in), their sensitivities (H, N), and the curvature above it (H, 1)."""
    spec, network = call.spec, memory_network(call.spec)
    keys = torch.stack([token.key for token in seen], dim=1)  # (H, N, D)
    reader = Dense(anchor.weights, torch.stack(decays, dim=1)[..., None])
    _, factors = network.factors(reader, call.feature.expand(keys), keys, lambda prediction: prediction)
    above = network.curvature * squared_norm_bound(anchor.weights["down"])
    terms = {}
    for site in spec.fast:
        inputs, _, sensitivity = factors[site]
        sensitivity = torch.ones_like(inputs[..., 0]) if sensitivity is None else sensitivity
        terms[site] = (inputs, sensitivity, None if site == "down" else above)
    return terms


def _retract(spec: MemorySpec, now: FastWeights) -> FastWeights:
    radius = spec.retraction
    assert radius is not None

    def back(x: Tensor) -> Tensor:
        return retract(x, radius)[0]

    weights = {site: back(w) if site in spec.fast else w for site, w in now.weights.items()}
    return FastWeights(weights, {site: back(s) for site, s in now.momentum.items()}, now.pending)


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
    parts = {name: buffer[0] for name, buffer in state.group("window").items()}
    return [_token(state.spec, parts, state.spec.window - 1 - count + i, None) for i in range(count)]


def _state_of(
    before: MemoryState, now: FastWeights, window: list[Token], open_chunk: list[Token], position: int
) -> MemoryState:
    tensors = {f"weights.{site}": weight[None] for site, weight in now.weights.items()}
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
