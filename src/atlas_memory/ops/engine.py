"""memorize: chunk-parallel evaluation of any spec.

Outside the loop, for many chunks at once: what depends on no state (coefficients, kernels of keys and queries and, for
exact matrix memories, the triangular inverse). Inside it, per chunk: the keys read the anchor and give the factors of
their gradients, in closed form; the queries read the anchor and the factors; the factors are folded into the next
anchor. No token's weights are built, and nothing is done token by token.

Shapes: B batch, T tokens, H heads, R = B·H rows, S chunks of C tokens, N = C + W − 1 tokens whose gradients a chunk
uses, Q queries, D key width, V value width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from atlas_memory.checks import check_whole
from atlas_memory.ops.call import Call, check_recall, prepare, without_autocast
from atlas_memory.ops.chunks import (
    Chunk,
    Schedule,
    align,
    idle_chunks,
    phase,
    schedule,
    select_chunks,
    stack_chunks,
    state_after,
    stretches,
    unstack,
    update_points,
)
from atlas_memory.ops.entries import kernel_features, unexpired
from atlas_memory.ops.exact_matrix import ImpulseChunk, impulse_chunk, impulse_errors, impulse_tokens
from atlas_memory.ops.fast_weights import FastWeights, align_entries, choose, of_state, retract_all, to_tensors
from atlas_memory.ops.features import Feature
from atlas_memory.ops.monitors import Monitors, Record, surprise_of
from atlas_memory.ops.networks import Factors, Network, memory_network
from atlas_memory.ops.optimizers import Coefficients, Gates, linear_coefficients, muon_coefficients
from atlas_memory.ops.packing import take_rows
from atlas_memory.ops.sites import Dense, Linear, Muon
from atlas_memory.ops.softmax import attend, attend_and_keep
from atlas_memory.ops.stability import (
    shrink_factor,
    squared_norm_bound,
    surprise_weighted,
    write_limit,
)
from atlas_memory.ops.state import MemoryState
from atlas_memory.spec import MemorySpec


def memorize(
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
    recompute: bool | None = None,
    monitors: Monitors | None = None,
    answered: int | None = None,
) -> tuple[Tensor, MemoryState]:
    """Read tokens into a memory, and answer each token's query right after it was written.

    queries, keys (B, T, H, key width) and values (B, T, H, value width); gates (B, T, H), the window's (B, T, H, W).
    initial: {site: (H, out, in)}, the weights before the first token (a matrix memory may start from zero). state: go
    on from here instead. coefficients (degree + 1,): of a polynomial. lengths: real tokens per row, the rest being
    right padding. check_finite: reject NaN and infinities; None: on the CPU. recompute: save memory in training by
    running every chunk again in the backward pass; None: where Muon builds many weights per chunk. monitors: filled
    with what happened inside. answered: only so many columns at the end are asked; what others answer means nothing.

    Returns the answers (B, T, H, value width), zero at padding, and the state after the last token. Works in float32,
    or in float64 if the keys are; differentiable with respect to every tensor, the state's included.
    """
    with without_autocast(keys):
        call = prepare(spec, queries, keys, values, gates, initial, state, coefficients, lengths, check_finite)
        if recompute is None:
            recompute = spec.optimizer == "muon" and 4 * spec.interval <= spec.chunk
        if monitors is not None and not isinstance(monitors, Monitors):
            raise ValueError(f"monitors must be Monitors or None, got {type(monitors).__name__}.")
        check_whole("answered", answered, least=0, optional=True)
        return _run(call, recompute, monitors, keys.shape[1] if answered is None else min(answered, keys.shape[1]))


def recall(
    spec: MemorySpec,
    queries: Tensor,
    state: MemoryState,
    *,
    coefficients: Tensor | None = None,
    check_finite: bool | None = None,
) -> Tensor:
    """Read without writing: every query (B, T, H, key width) at the state after the last token. (B, T, H, V)."""
    check_recall(spec, queries, state, check_finite)
    with without_autocast(queries):
        call = prepare(spec, *_no_tokens(spec, queries, state), None, state, coefficients, None, check_finite)
        queries = queries.to(call.keys.dtype)
        groups, back = _groups(call)
        answers = [_answer(_rows_of(call, group), queries[group]) for group in groups]
        return answers[0] if len(groups) == 1 else torch.cat(answers)[back]


def _answer(call: Call, queries: Tensor) -> Tensor:
    if call.spec.normalised:
        return attend(call._replace(queries=queries))
    now, model = _weights_now(call), _model(call)
    answers = _read_at(model, now, queries.movedim(2, 1).flatten(0, 1))
    return answers.unflatten(0, (queries.shape[0], -1)).movedim(1, 2)


def _no_tokens(spec: MemorySpec, queries: Tensor, state: MemoryState) -> tuple[Tensor, Tensor, Tensor, Gates]:
    """Arguments of a call that reads nothing, with the gates the state was made with."""
    gate = queries.new_zeros(queries.shape[0], 0, queries.shape[2])
    keys, values = (
        gate[..., None].expand(-1, -1, -1, spec.key_width),
        gate[..., None].expand(-1, -1, -1, spec.value_width),
    )
    present: dict[str, Tensor] = {name: gate for name in Gates._fields[:3] if f"open.{name}" in state.tensors}
    if "open.window" in state.tensors:
        present["window"] = gate[..., None].expand(-1, -1, -1, spec.window)
    if spec.carries_momentum:
        present["momentum"] = gate
    return keys, keys, values, Gates(**present)


class Model(NamedTuple):
    spec: MemorySpec
    network: Network
    feature: Feature


def _model(call: Call) -> Model:
    return Model(call.spec, memory_network(call.spec), call.feature)


def _inputs(model: Model, anchor: FastWeights, x: Tensor, first: int = -1, step: int = 0) -> Tensor:
    """What the first layer sees of x (R, Q, D): its features.

    first, step: the place of the token whose state each x reads, and how it grows; the default is the anchor, for all.
    """
    if anchor.entries is None:
        return model.feature.expand(x)
    places = first + step * torch.arange(x.shape[1], device=x.device)
    return kernel_features(model.feature, anchor.entries, x, places, model.spec.horizon)


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


def _run(call: Call, recompute: bool, monitors: Monitors | None, answered: int) -> tuple[Tensor, MemoryState]:
    if call.spec.normalised:
        return attend_and_keep(call, monitors)
    groups, back = _groups(call)
    if len(groups) == 1:
        return _run_together(call, recompute, monitors, answered)
    watchers = [None if monitors is None else Monitors() for _ in groups]
    parts = [
        _run_together(_rows_of(call, group), recompute, watcher, answered)
        for group, watcher in zip(groups, watchers, strict=True)
    ]
    if monitors is not None:
        monitors.join([watcher for watcher in watchers if watcher is not None], back)
        monitors.watch_writes(call)
    return torch.cat([outputs for outputs, _ in parts])[back], MemoryState.cat([s for _, s in parts]).select(back)


def _groups(call: Call) -> tuple[list[list[int]], list[int]]:
    """Rows whose grids lie alike on all schedules are run together: as a rule, all of them. And the way back."""
    positions = zip(call.state.position, call.state.fill, strict=True)
    phases = [phase(call.spec, position - fill) for position, fill in positions]
    groups = [[row for row, value in enumerate(phases) if value == chosen] for chosen in sorted(set(phases))]
    order = [row for group in groups for row in group]
    return groups or [[]], sorted(range(len(order)), key=order.__getitem__)


def _rows_of(call: Call, rows: list[int]) -> Call:
    if len(rows) == call.state.batch:
        return call
    gates = Gates(*(None if gate is None else gate[rows] for gate in call.gates))
    tokens = call.queries[rows], call.keys[rows], call.values[rows]
    lengths = tuple(call.lengths[row] for row in rows)
    return Call(call.spec, call.feature, *tokens, gates, call.state.select(rows), lengths)


def _run_together(call: Call, recompute: bool, monitors: Monitors | None, answered: int) -> tuple[Tensor, MemoryState]:
    spec, model = call.spec, _model(call)
    batch, tokens, heads = call.keys.shape[:3]
    aligned = align(call)
    first_asked = min(aligned.fills) + tokens - answered  # column
    pieces = stretches(spec, aligned, first_asked)
    step = _recomputed_step if recompute and torch.is_grad_enabled() else _step
    carried = of_state(call.state)
    answers: list[Tensor] = []
    for begin, end in pieces:
        chunks, size = stack_chunks(spec, aligned, begin, end)
        # where all is one chunk, as in decoding, the tokens of earlier calls need no answer
        skipped = min(aligned.fills) if len(pieces) == 1 and chunks.keys.shape[0] == 1 else 0
        skipped = size if end <= first_asked else skipped
        chunks = chunks._replace(queries=chunks.queries[:, :, skipped:])
        idle = [False] * len(chunks.keys) if monitors is not None else idle_chunks(spec, chunks)
        busy = iter(_prepare_chunks(model, select_chunks(chunks, [not still for still in idle]), size))
        for still, run in itertools.groupby(range(len(idle)), key=idle.__getitem__):
            if still:
                queries = chunks.queries[list(run)].movedim(0, 1).flatten(1, 2)  # (R, S · C, D)
                answers.append(_read_at(model, carried, queries))
                continue
            for number in run:
                plan = schedule(spec, aligned, begin + number * size, size, call.keys.device, heads)
                outputs, carried, record = step(model, carried, next(busy), plan, monitors is not None)
                answers.append(outputs)
                if monitors is not None and record is not None:
                    monitors.add(record)
        answers[-1] = answers[-1][:, : answers[-1].shape[1] - (-(end - begin) % size)]

    def unaligned(x: Tensor) -> Tensor:
        """(R, L, ...) → (B, T, H, ...), the new tokens of each row."""
        x = x.unflatten(0, (batch, heads)).movedim(1, 2)
        starts = [fill - (max(aligned.totals) - x.shape[1]) for fill in aligned.fills]
        return take_rows(x, starts, tokens, call.lengths)

    if monitors is not None:
        monitors.finish(call, carried, unaligned)
    y = torch.cat(answers, dim=1) if answers else call.values.new_zeros(batch * heads, 0, spec.value_width)
    after = state_after(call, aligned, to_tensors(spec, carried, batch))
    return unaligned(y), after.with_entries_aligned()


def _read_at(model: Model, weights: FastWeights, queries: Tensor) -> Tensor:
    """Answers (R, Q, V) to queries (R, Q, D), all at the same weights."""
    return model.network.forward(Dense(weights.weights), _inputs(model, weights, queries), queries)


def _prepare_chunks(model: Model, chunks: Chunk, size: int) -> list[Prepared]:
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


def _step(
    model: Model, anchor: FastWeights, prepared: Prepared, plan: Schedule, monitor: bool
) -> tuple[Tensor, FastWeights, Record | None]:
    """One chunk: answers (R, Q, V), and the weights its end leaves behind."""
    update, record = _update(model, anchor, prepared, plan.place, monitor)
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


def _recomputed_step(*arguments: Any) -> tuple[Tensor, FastWeights, Record | None]:
    result: tuple[Tensor, FastWeights, Record | None] = checkpoint(
        _step, *arguments, use_reentrant=False, preserve_rng_state=False
    )
    return result


def _update(
    model: Model, anchor: FastWeights, prepared: Prepared, place: int, monitor: bool
) -> tuple[Linear | Muon, Record | None]:
    """The chunk's gradients at the anchor, and what the optimizer makes of them."""
    spec, chunk, impulses = model.spec, prepared.chunk, prepared.impulses
    if impulses is not None:
        entries = None
        if anchor.entries is not None:  # each token's impulses read the state before it
            before = torch.arange(-1, chunk.keys.shape[1] - spec.window, device=chunk.keys.device)
            places = before.repeat_interleave(spec.window)
            entries = kernel_features(model.feature, anchor.entries, impulses.inputs, places, spec.horizon)
        errors = impulse_errors(impulses, anchor.weights["down"], anchor.momentum.get("down"), entries)
        solved = {"down": Factors(impulses.inputs, errors)}
        kernels = {"down": prepared.feature_kernel}
        update = Linear(anchor, solved, impulses.coefficients, {}, kernels, chunk.keys, spec.window)
        return update, Record.of_impulses(model.feature, impulses, errors, spec.window) if monitor else None
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


def _weights_now(call: Call) -> FastWeights:
    """The weights after the last token: the anchor and the open chunk."""
    aligned, anchor = align(call), of_state(call.state)
    if not any(aligned.fills):
        return anchor
    model = _model(call)
    chunks, size = stack_chunks(call.spec, aligned, 0, max(aligned.fills))
    (prepared,) = _prepare_chunks(model, chunks._replace(queries=chunks.queries[:, :, size:]), size)
    heads, device = call.keys.shape[2], call.keys.device
    last = torch.tensor([max(fill - 1, 0) for fill in aligned.fills], device=device).repeat_interleave(heads)
    alive = torch.tensor([fill > 0 for fill in aligned.fills], device=device).repeat_interleave(heads)
    update, _ = _update(model, anchor, prepared, aligned.starts[0], monitor=False)
    now = choose(alive[:, None, None], update.fold(last), anchor)
    return align_entries(call.spec, now, [size - fill for fill in aligned.fills])
