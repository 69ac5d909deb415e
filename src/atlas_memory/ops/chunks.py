"""Tokens → chunks. Each row's own chunk grid, laid side by side, so that the engine sees whole chunks only.

A row's sequence in one call is: its open chunk (from the state), then the new tokens. Rows are shifted until all grids
start at column 0. Shapes: B batch, L aligned tokens, H heads, R = B·H rows, S chunks of C tokens, N = C + W − 1.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_memory.ops.call import Call
from atlas_memory.ops.idle import idle
from atlas_memory.ops.optimizers import Gates
from atlas_memory.ops.packing import last_rows, take_rows
from atlas_memory.ops.state import MemoryState
from atlas_memory.spec import MemorySpec

# Chunks whose kernels and coefficients are held at once: enough to fill the machine, bounded however long the call is.
CHUNKS_AT_ONCE = 64


class Aligned(NamedTuple):
    """The tokens of a call on their chunk grids."""

    queries: Tensor  # (B, L, H, D), zero where a token was answered in an earlier call
    keys: Tensor  # (B, W − 1 + L, H, D): the window before the grid, then the tokens
    values: Tensor  # (B, W − 1 + L, H, V)
    gates: Gates  # (B, L, H), as given
    reaching: Gates  # the same, with γ = 0 where the window would reach before the first token
    starts: tuple[int, ...]  # tokens each row had read where its grid starts
    fills: tuple[int, ...]  # tokens of the open chunk
    totals: tuple[int, ...]  # open and new tokens


def align(call: Call) -> Aligned:
    spec, state = call.spec, call.state
    fills = state.fill
    totals = tuple(fill + length for fill, length in zip(fills, call.lengths, strict=True))
    longest = max((0, *totals))
    starts = tuple(position - fill for position, fill in zip(state.position, fills, strict=True))

    def joined(name: str, new: Tensor) -> Tensor:
        if max((0, *fills)) == 0:
            return take_rows(new, [0] * len(fills), longest)
        opened = state.tensors.get(f"open.{name}")
        if opened is None:  # queries: answered already
            opened = new.new_zeros(new.shape[0], spec.chunk - 1, *new.shape[2:])
        both = torch.cat([opened, new], dim=1)
        return take_rows(both, [spec.chunk - 1 - fill for fill in fills], longest)

    gates = Gates(*(None if g is None else joined(name, g) for name, g in call.gates._asdict().items()))
    keys, values = joined("keys", call.keys), joined("values", call.values)
    if spec.window > 1:
        keys = torch.cat([state.window("keys"), keys], dim=1)
        values = torch.cat([state.window("values"), values], dim=1)
    reaching = _without_missing_window(spec, gates, keys, starts)
    return Aligned(joined("queries", call.queries), keys, values, gates, reaching, starts, fills, totals)


def _without_missing_window(spec: MemorySpec, gates: Gates, keys: Tensor, starts: tuple[int, ...]) -> Gates:
    """γ_tj = 0 where token t − j lies before the sequence's first token."""
    if spec.window == 1 or min(starts) >= spec.window - 1:
        return gates
    tokens = keys.shape[1] - spec.window + 1
    device = keys.device
    first = torch.tensor(starts, device=device)[:, None] if len(set(starts)) > 1 else starts[0]
    places = (torch.arange(tokens, device=device) + first).expand(len(starts), -1)
    exists = (torch.arange(spec.window, device=device) <= places[..., None]).to(keys)[:, :, None]  # (B, L, 1, W)
    window = exists.expand(-1, -1, keys.shape[2], -1) if gates.window is None else gates.window * exists
    return gates._replace(window=window)


def state_after(call: Call, aligned: Aligned, fast: dict[str, Tensor]) -> MemoryState:
    """The state after the call. `fast`: weights, momentum and pending steps at each row's last anchor."""
    spec, state = call.spec, call.state
    size = spec.anchor_chunk
    position = [before + length for before, length in zip(state.position, call.lengths, strict=True)]
    anchors = [total - total % size for total in aligned.totals]  # columns
    tensors = dict(fast)
    known = [min(start + anchor, spec.window - 1) for start, anchor in zip(aligned.starts, anchors, strict=True)]
    ends = [spec.window - 1 + anchor for anchor in anchors]
    for name in state.group("window"):
        tensors[f"window.{name}"] = last_rows(getattr(aligned, name), ends, spec.window - 1, known)
    opened = {name: buffer.shape[1] for name, buffer in state.group("open").items()}
    if opened:
        fills = [total - anchor for total, anchor in zip(aligned.totals, anchors, strict=True)]
        sources = {"keys": aligned.keys[:, spec.window - 1 :], "values": aligned.values[:, spec.window - 1 :]}
        sources |= {name: gate for name, gate in aligned.gates._asdict().items() if gate is not None}
        for name, slots in opened.items():
            tensors[f"open.{name}"] = last_rows(sources[name], aligned.totals, slots, fills)
    return state.updated(tensors, position)


class Chunk(NamedTuple):
    """One chunk, rows flattened; or all chunks of a stretch, stacked (S, ...)."""

    queries: Tensor  # (R, C, D)
    keys: Tensor  # (R, N, D)
    values: Tensor  # (R, N, V)
    gates: Gates  # (R, C)


class Schedule(NamedTuple):
    """What the host knows of one chunk: which token it is folded at, which rows go on, and which are retracted."""

    place: int  # of the chunk's first token in the sequence, modulo the spec's own period
    last: Tensor | int | None  # None: no row is folded
    alive: Tensor | None  # (R, 1, 1) bool; None: all rows
    retracted: Tensor | bool  # (R, 1, 1) bool where rows differ
    missing: tuple[int, ...]  # tokens of the chunk that are not folded, per batch row


def chunk_size(spec: MemorySpec) -> int:
    """Tokens the engine takes at once. Exact solves have one unknown per token and window place: keep them small."""
    if not (spec.exact and spec.objective == "regression"):
        return spec.chunk
    fitting = max(1, 64 // spec.window)
    return max(size for size in range(1, min(fitting, spec.chunk) + 1) if spec.chunk % size == 0)


def stretches(spec: MemorySpec, aligned: Aligned, first_asked: int = 0) -> list[tuple[int, int]]:
    """Column ranges to work on one after the other; the chunks before the one of `first_asked` in ranges of their own.

    Retracted exact memories break at their chunk grid. What is left of a chunk may be no multiple of the size taken at
    once: the odd piece comes first, since padding may stand nowhere but at the very end.
    """
    longest = max((0, *aligned.totals))
    first = 0
    if spec.exact and spec.retracts:
        first = min(-aligned.starts[0] % spec.chunk, longest)
    at_once = chunk_size(spec)
    size = at_once * CHUNKS_AT_ONCE
    asked = first + max(first_asked - first, 0) // at_once * at_once
    bounds = sorted({0, first % at_once, first, *range(first + size, longest, size), min(asked, longest), longest})
    return list(itertools.pairwise(bounds))


def stack_chunks(spec: MemorySpec, aligned: Aligned, begin: int, end: int) -> tuple[Chunk, int]:
    """The chunks of columns begin … end, stacked, and their size C. A short single chunk is not padded."""
    tokens = end - begin
    size = min(chunk_size(spec), tokens)
    count = -(-tokens // size)
    padding = count * size - tokens

    def stacked(x: Tensor, history: int = 0) -> Tensor:
        """(B, ..., H, ...) → (S, R, history + C, ...)."""
        x = x[:, begin : end + history]
        if padding:
            x = torch.cat([x, x.new_zeros(x.shape[0], padding, *x.shape[2:])], dim=1)
        if history:
            x = x.unfold(1, size + history, size).movedim(-1, 2)  # (B, S, N, H, ...)
        else:
            x = x.unflatten(1, (count, size))
        return x.movedim(0, 1).movedim(3, 2).flatten(1, 2)

    gates = Gates(*(None if gate is None else stacked(gate) for gate in aligned.reaching))
    history = spec.window - 1
    return Chunk(
        stacked(aligned.queries), stacked(aligned.keys, history), stacked(aligned.values, history), gates
    ), size


def idle_chunks(spec: MemorySpec, chunks: Chunk) -> list[bool]:
    """Of every chunk, whether all of its tokens, in all rows, are known to be idle."""
    still = idle(spec, chunks.gates)
    if still is None:
        return [False] * len(chunks.keys)
    idle_ones: list[bool] = still.flatten(1).all(1).tolist()
    return idle_ones


def select_chunks(chunks: Chunk, chosen: list[bool]) -> Chunk:
    if all(chosen):
        return chunks
    places = [place for place, choice in enumerate(chosen) if choice]
    gates = Gates(*(None if gate is None else gate[places] for gate in chunks.gates))
    return Chunk(chunks.queries[places], chunks.keys[places], chunks.values[places], gates)


def schedule(spec: MemorySpec, aligned: Aligned, column: int, size: int, device: torch.device, heads: int) -> Schedule:
    """The schedule of the chunk of `size` tokens at `column`."""
    present = [min(max(total - column, 0), size) for total in aligned.totals]
    folded = [n > 0 if spec.exact else n == spec.chunk for n in present]
    ends = [start + column + n for start, n in zip(aligned.starts, present, strict=True)]
    # Compilers count positions in symbols: a plain True or False is what the rest can ask for.
    retracted = [f and spec.retracts and end % spec.chunk == 0 for f, end in zip(folded, ends, strict=True)]

    def per_row(values: list[Any]) -> Tensor:
        return torch.tensor(values, device=device).repeat_interleave(heads)

    def flags(values: list[bool]) -> Tensor:
        return per_row(values)[:, None, None]

    last: Tensor | int | None = None
    if any(folded):
        together = not spec.exact or len(set(present)) == 1  # anchored memories are folded at whole chunks only
        last = max(present) - 1 if together else per_row([max(n - 1, 0) for n in present])
    return Schedule(
        aligned.starts[0] + column,
        last,
        None if all(folded) or not any(folded) else flags(folded),
        (True if retracted[0] else False) if len(set(retracted)) == 1 else flags(retracted),  # noqa: SIM210
        tuple(size - n if f else size for n, f in zip(present, folded, strict=True)),
    )


def update_points(spec: MemorySpec, place: int, size: int) -> range:
    """Muon's update points among `size` tokens from `place`: position ≡ r − 1 (mod r) from the sequence's own start."""
    return range((spec.interval - 1 - place) % spec.interval, size, spec.interval)


def phase(spec: MemorySpec, start: int) -> int:
    """What rows must share to be worked on together: where their grid lies on the schedules that do not divide it."""
    if spec.optimizer == "muon" and (spec.exact or spec.chunk % spec.interval):
        return start % spec.interval
    return start % spec.chunk if spec.exact and spec.retracts else 0


def unstack(tree: Any, count: int) -> list[Any]:
    """Named tuples of tensors stacked (S, ...) → S named tuples of tensors."""
    if tree is None:
        return [None] * count
    if isinstance(tree, Tensor):
        return list(tree.unbind(0))
    columns = [unstack(leaf, count) for leaf in tree]
    return [type(tree)(*leaves) for leaves in zip(*columns, strict=True)]
