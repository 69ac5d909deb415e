"""One chunk of any spec: what it needs that depends on no state, and the step from one anchor to the next.

The keys read the anchor and give the factors of their gradients, in closed form; the queries read the anchor and the
factors; the factors are folded into the next anchor.

Shapes: R rows (batch × heads), S chunks of C tokens, N = C + W − 1 tokens whose gradients a chunk uses, Q queries,
D key width, V value width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from atlas_memory.ops.call import Call
from atlas_memory.ops.chunks import Chunk, Schedule, unstack, update_points
from atlas_memory.ops.entries import kernel_features, unexpired
from atlas_memory.ops.exact_matrix import ImpulseChunk, impulse_chunk, impulse_errors, impulse_tokens
from atlas_memory.ops.fast_weights import FastWeights, align_entries, choose, retract_all
from atlas_memory.ops.features import Feature
from atlas_memory.ops.monitors import Record, surprise_of
from atlas_memory.ops.networks import Factors, Network, memory_network
from atlas_memory.ops.optimizers import Coefficients, linear_coefficients, muon_coefficients
from atlas_memory.ops.sites import Dense, Linear, Muon
from atlas_memory.ops.stability import shrink_factor, squared_norm_bound, surprise_weighted, write_limit
from atlas_memory.spec import MemorySpec


class Model(NamedTuple):
    spec: MemorySpec
    network: Network
    feature: Feature


class Bound(NamedTuple):
    """Of the write limiter."""

    gram: Tensor  # (R, N, N): absolute kernel of keys
    step: Tensor | None  # (R, C, N): P + σB; None: known only inside the loop
    written: Tensor | None  # (R, C, N): 1 where the step is not 0


class Prepared(NamedTuple):
    """One chunk, with what depends on no state; or many, stacked (S, ...)."""

    chunk: Chunk
    coefficients: Coefficients | None  # None: known only inside the loop
    feature_kernel: Tensor  # (R, Q, N): of queries and keys
    bound: Bound | None  # what the limiter needs
    impulses: ImpulseChunk | None  # exact solves


def model_of(call: Call) -> Model:
    return Model(call.spec, memory_network(call.spec), call.feature)


def _inputs(model: Model, anchor: FastWeights, x: Tensor, first: int = -1, step: int = 0) -> Tensor:
    """What the first layer sees of x (R, Q, D): its features.

    first, step: the place of the token whose state each x reads, and how it grows; the default is the anchor, for all.
    """
    if anchor.entries is None:
        return model.feature.expand(x)
    places = first + step * torch.arange(x.shape[1], device=x.device)
    return kernel_features(model.feature, anchor.entries, x, places, model.spec.horizon)


def read_at(model: Model, weights: FastWeights, queries: Tensor) -> Tensor:
    """Answers (R, Q, V) to queries (R, Q, D), all at the same weights."""
    return model.network.forward(Dense(weights.weights), _inputs(model, weights, queries), queries)


def prepare_chunks(model: Model, chunks: Chunk, size: int) -> list[Prepared]:
    """Everything that depends on no state, for all chunks at once. chunks: the last Q tokens of each are asked."""
    spec, feature = model.spec, model.feature
    skipped = size - chunks.queries.shape[2]
    places = torch.arange(size, device=chunks.keys.device)
    if spec.exact and spec.objective == "regression":
        keys, values = (_windows(x, spec.window) for x in (chunks.keys, chunks.values))
        impulses = impulse_chunk(spec, feature, keys, values, chunks.gates)
        kernel = feature.kernel(chunks.queries, keys.flatten(-3, -2))
        kernel = unexpired(kernel, places[skipped:], impulse_tokens(keys), spec.horizon)
        stacked = Prepared(chunks, impulses.coefficients, kernel, None, impulses)
    else:
        known = spec.optimizer != "muon" and spec.surprise_retention is None
        coefficients = _linear(chunks, size) if known else None
        bound = None
        if spec.limits_writes and spec.optimizer != "muon":
            step = None if coefficients is None else coefficients.steps()
            gram = feature.kernel(chunks.keys, chunks.keys).abs()
            bound = Bound(gram, step, None if step is None else _written(step))
        kernel = feature.kernel(chunks.queries, chunks.keys)
        written = torch.arange(1 - spec.window, size, device=kernel.device)
        kernel = unexpired(kernel, places[skipped:], written, spec.horizon)
        stacked = Prepared(chunks, coefficients, kernel, bound, None)
    return unstack(stacked, chunks.keys.shape[0])


def _windows(x: Tensor, width: int) -> Tensor:
    """(..., N, D) → (..., C, W, D): the tokens in every token's window, offset 0 first."""
    return x[..., None, :] if width == 1 else x.unfold(-2, width, 1).mT.flip(-2)


def _written(step: Tensor) -> Tensor:
    return (step > 0).to(step.dtype)


def _linear(chunk: Chunk, size: int) -> Coefficients:
    return linear_coefficients(chunk.gates, chunk.keys[..., -size:, :], chunk.keys.shape[-2])


def take_step(
    model: Model, anchor: FastWeights, prepared: Prepared, plan: Schedule, monitor: bool
) -> tuple[Tensor, FastWeights, Record | None]:
    """One chunk: answers (R, Q, V), and the weights its end leaves behind."""
    update, record = update_of(model, anchor, prepared, plan.place, monitor)
    queries = prepared.chunk.queries
    size = prepared.chunk.keys.shape[1] - model.spec.window + 1
    inputs = _inputs(model, anchor, queries, first=size - queries.shape[1], step=1)
    outputs = model.network.forward(update, inputs, queries)
    if plan.last is None:
        return outputs, anchor, record
    after = update.fold(plan.last)
    if plan.alive is not None:
        after = choose(plan.alive, after, anchor)
    after = align_entries(model.spec, after, plan.missing)
    if plan.retracted is not False:
        after, factors = retract_all(model.spec, after, plan.retracted)
        record = None if record is None else record._replace(retraction=factors)
    return outputs, after, record


def take_step_recomputed(*arguments: Any) -> tuple[Tensor, FastWeights, Record | None]:
    result: tuple[Tensor, FastWeights, Record | None] = checkpoint(
        take_step, *arguments, use_reentrant=False, preserve_rng_state=False
    )
    return result


def update_of(
    model: Model, anchor: FastWeights, prepared: Prepared, place: int, monitor: bool
) -> tuple[Linear | Muon, Record | None]:
    """The chunk's gradients at the anchor, and what the optimizer makes of them."""
    if prepared.impulses is not None:
        return _solved(model, anchor, prepared, prepared.impulses, monitor)
    spec, chunk = model.spec, prepared.chunk
    size = chunk.keys.shape[1] - spec.window + 1
    factors = _factors(model, anchor, chunk, size)
    features = dict.fromkeys(spec.feature_sites, model.feature)
    surprise = surprise_of(factors, features) if monitor or spec.surprise_retention or spec.write_cap else None
    record = None
    if monitor and surprise is not None:
        record = Record.of_factors(factors, features, surprise, chunk.gates, size)
    gates = chunk.gates
    if surprise is not None and spec.surprise_retention is not None and gates.retention is not None:
        weighted = surprise_weighted(gates.retention, surprise[:, -size:], spec.surprise_retention)
        gates = gates._replace(retention=weighted)
        chunk = chunk._replace(gates=gates)
    if surprise is not None and spec.write_cap is not None:
        factor = shrink_factor(surprise, spec.write_cap)[..., None]
        factors = {site: f._replace(deltas=f.deltas * factor) for site, f in factors.items()}
    if spec.optimizer == "muon":
        assert anchor.pending is not None
        points = update_points(spec, place, size)
        rows = muon_coefficients(gates, anchor.pending, points, chunk.keys[:, -size:], chunk.keys.shape[1])
        curvatures = _curvatures(model, anchor, factors) if spec.limits_writes else {}
        muon = Muon(anchor, factors, rows, points, spec.newton_schulz_steps, spec.momentum_floor, curvatures)
        return muon, None if record is None else record._replace(limits=muon.token_limits())
    coefficients = prepared.coefficients if prepared.coefficients is not None else _linear(chunk, size)
    limits = _limits(model, anchor, factors, coefficients, prepared.bound)
    record = None if record is None else record._replace(limits=limits)
    kernels = dict.fromkeys(spec.feature_sites, prepared.feature_kernel)
    return Linear(anchor, factors, coefficients, limits, kernels, chunk.keys), record


def _solved(
    model: Model, anchor: FastWeights, prepared: Prepared, impulses: ImpulseChunk, monitor: bool
) -> tuple[Linear, Record | None]:
    """The same of exact memories: every gradient at the state of the token before it."""
    spec, keys = model.spec, prepared.chunk.keys
    entries = None
    if anchor.entries is not None:  # each token's impulses read the state before it
        before = torch.arange(-1, keys.shape[1] - spec.window, device=keys.device)
        places = before.repeat_interleave(spec.window)
        entries = kernel_features(model.feature, anchor.entries, impulses.inputs, places, spec.horizon)
    errors = impulse_errors(impulses, anchor.weights["down"], anchor.momentum.get("down"), entries)
    factors, kernels = {"down": Factors(impulses.inputs, errors)}, {"down": prepared.feature_kernel}
    update = Linear(anchor, factors, impulses.coefficients, {}, kernels, keys, spec.window)
    return update, Record.of_impulses(model.feature, impulses, errors, spec.window) if monitor else None


def _factors(model: Model, anchor: FastWeights, chunk: Chunk, size: int) -> dict[str, Factors]:
    """(input, δ) of every token in the loss, at the anchor: closed form."""
    spec = model.spec
    decay = None
    if spec.gradient_at == "decayed" and chunk.gates.retention is not None:
        left = chunk.gates.retention.cumprod(-1)
        before = left[:, :1].expand(-1, chunk.keys.shape[1] - size)
        decay = torch.cat([before, left], dim=1)[..., None]

    def error(prediction: Tensor) -> Tensor:
        return -chunk.values if spec.objective == "dot" else prediction - chunk.values

    reader = Dense(anchor.weights, decay)
    _, factors = model.network.factors(reader, _inputs(model, anchor, chunk.keys), chunk.keys, error)
    entries = {site: factors[site]._replace(inputs=chunk.keys) for site in spec.cached_sites}
    return {site: entries[site] if site in entries else factors[site] for site in spec.fast}


def _limits(
    model: Model,
    anchor: FastWeights,
    factors: Mapping[str, Factors],
    coefficients: Coefficients,
    bound: Bound | None,
) -> dict[str, Tensor]:
    """ℓ_t (R, C) of every fast layer."""
    if bound is None:
        return {}
    step = coefficients.steps() if bound.step is None else bound.step
    written = _written(step) if bound.written is None else bound.written
    curvatures, limits = _curvatures(model, anchor, factors), {}
    for site, (inputs, _, sensitivity) in factors.items():
        gram = bound.gram if site in model.spec.feature_sites else torch.bmm(inputs, inputs.mT).abs()
        if sensitivity is not None:
            gram = gram * sensitivity[:, :, None] * sensitivity[:, None, :]
        limits[site] = write_limit(step, written, gram, curvatures[site])
    return limits


def _curvatures(model: Model, anchor: FastWeights, sites: Iterable[str]) -> dict[str, Tensor | None]:
    """What the layers above each site add to its bound, at the anchor (R, 1); None: nothing."""
    if all(site == "down" for site in sites):
        return {"down": None}
    above = model.network.curvature * squared_norm_bound(anchor.weights["down"])
    return {site: None if site == "down" else above for site in sites}
