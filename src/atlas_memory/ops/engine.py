"""memorize: chunk-parallel evaluation of any spec.

Outside the loop, for many chunks at once: what depends on no state (coefficients, kernels of keys and queries and, for
exact matrix memories, the triangular inverse). Inside it, per chunk, a step from one anchor to the next
(`chunk_step.py`). No token's weights are built, and nothing is done token by token.

Shapes: B batch, T tokens, H heads, R = B·H rows, S chunks of C tokens, Q queries, D key width, V value width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atlas_memory.checks import check_whole
from atlas_memory.ops.call import Call, check_recall, prepare, without_autocast
from atlas_memory.ops.chunk_step import model_of, prepare_chunks, read_at, take_step, take_step_recomputed, update_of
from atlas_memory.ops.chunks import (
    align,
    idle_chunks,
    phase,
    schedule,
    select_chunks,
    stack_chunks,
    state_after,
    stretches,
)
from atlas_memory.ops.fast_weights import FastWeights, align_entries, choose, of_state, to_tensors
from atlas_memory.ops.monitors import Monitors
from atlas_memory.ops.optimizers import Gates
from atlas_memory.ops.packing import take_rows
from atlas_memory.ops.softmax import attend, attend_and_keep
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
    now, model = _weights_now(call), model_of(call)
    answers = read_at(model, now, queries.movedim(2, 1).flatten(0, 1))
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
    spec, model = call.spec, model_of(call)
    batch, tokens, heads = call.keys.shape[:3]
    aligned = align(call)
    first_asked = min(aligned.fills) + tokens - answered  # column
    pieces = stretches(spec, aligned, first_asked)
    step = take_step_recomputed if recompute and torch.is_grad_enabled() else take_step
    carried = of_state(call.state)
    answers: list[Tensor] = []
    for begin, end in pieces:
        chunks, size = stack_chunks(spec, aligned, begin, end)
        # where all is one chunk, as in decoding, the tokens of earlier calls need no answer
        skipped = min(aligned.fills) if len(pieces) == 1 and chunks.keys.shape[0] == 1 else 0
        skipped = size if end <= first_asked else skipped
        chunks = chunks._replace(queries=chunks.queries[:, :, skipped:])
        idle = [False] * len(chunks.keys) if monitors is not None else idle_chunks(spec, chunks)
        busy = iter(prepare_chunks(model, select_chunks(chunks, [not still for still in idle]), size))
        for still, run in itertools.groupby(range(len(idle)), key=idle.__getitem__):
            if still:
                queries = chunks.queries[list(run)].movedim(0, 1).flatten(1, 2)  # (R, S · C, D)
                answers.append(read_at(model, carried, queries))
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


def _weights_now(call: Call) -> FastWeights:
    """The weights after the last token: the anchor and the open chunk."""
    aligned, anchor = align(call), of_state(call.state)
    if not any(aligned.fills):
        return anchor
    model = model_of(call)
    chunks, size = stack_chunks(call.spec, aligned, 0, max(aligned.fills))
    (prepared,) = prepare_chunks(model, chunks._replace(queries=chunks.queries[:, :, size:]), size)
    heads, device = call.keys.shape[2], call.keys.device
    last = torch.tensor([max(fill - 1, 0) for fill in aligned.fills], device=device).repeat_interleave(heads)
    alive = torch.tensor([fill > 0 for fill in aligned.fills], device=device).repeat_interleave(heads)
    update, _ = update_of(model, anchor, prepared, aligned.starts[0], monitor=False)
    now = choose(alive[:, None, None], update.fold(last), anchor)
    return align_entries(call.spec, now, [size - fill for fill in aligned.fills])
