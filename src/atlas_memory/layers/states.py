"""What attention and whole blocks carry from call to call: immutable, batch-first, with the verbs of MemoryState."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from atlas_memory.ops import MemoryState
from atlas_memory.ops.packing import take_rows
from atlas_memory.ops.state import Rows, Verbs, checked_rows


@dataclasses.dataclass(frozen=True)
class AttentionState(Verbs):
    """The keys and values that later tokens may still see, right-aligned, zeros before.

    keys, values (B, N, S, H, D): N places, S sources of keys per place; keys are not rotated. position: tokens read per
    row, of which the last N at most are kept.
    """

    keys: Tensor
    values: Tensor
    position: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.position)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.keys, self.values))

    def map(self, function: Callable[[Tensor], Tensor]) -> AttentionState:
        return AttentionState(function(self.keys), function(self.values), self.position)

    def select(self, rows: Rows) -> AttentionState:
        """The state of these rows, in this order; rows may repeat (beam search)."""
        indices = checked_rows(rows, self.batch)
        chosen = self.map(lambda tensor: tensor.index_select(0, torch.tensor(indices, device=tensor.device)))
        return dataclasses.replace(chosen, position=tuple(self.position[r] for r in indices))

    @staticmethod
    def cat(states: Sequence[AttentionState]) -> AttentionState:
        """Rows of several states, one below the other; those that keep fewer places get empty ones before."""
        places = max(state.keys.shape[1] for state in states)

        def joined(name: str) -> Tensor:
            leaves = (getattr(state, name) for state in states)
            return torch.cat([take_rows(x, [x.shape[1] - places] * len(x), places) for x in leaves])

        return AttentionState(joined("keys"), joined("values"), tuple(n for state in states for n in state.position))

    def last(self, places: int) -> AttentionState:
        """With no more than the last places."""
        return self.map(lambda tensor: tensor[:, max(tensor.shape[1] - places, 0) :])

    def advanced(self, tokens: int) -> AttentionState:
        """As if so many more had been read before those that are kept."""
        return dataclasses.replace(self, position=tuple(n + tokens for n in self.position)) if tokens else self

    def restarted(self, rows: Sequence[bool]) -> AttentionState:
        """As if the marked rows had read nothing: what they keep is no longer visible."""
        position = tuple(0 if restart else n for restart, n in zip(rows, self.position, strict=True))
        return dataclasses.replace(self, position=position)

    def replaced(self, rows: Sequence[bool], other: AttentionState) -> AttentionState:
        """The marked rows as in another state, of the same shape unless it has read nothing."""
        if not any(other.position):
            return self.restarted(rows)
        marked = torch.tensor(rows, device=self.keys.device)[:, None, None, None, None]
        position = tuple(b if mark else a for mark, a, b in zip(rows, self.position, other.position, strict=True))
        return AttentionState(
            torch.where(marked, other.keys, self.keys), torch.where(marked, other.values, self.values), position
        )

    def check(self, batch: int, device: torch.device) -> None:
        """Raise unless `batch` rows on `device` can go on from here."""
        if self.batch != batch:
            raise ValueError(f"state has {self.batch} rows, but the input has {batch}; use state.select(rows).")
        if self.keys.device != device:
            raise ValueError(f"state is on {self.keys.device}, the input on {device}; use state.to(...).")


@dataclasses.dataclass(frozen=True)
class BlockState(Verbs):
    """The states of a block's parts, by name; the first part counts the tokens."""

    parts: Mapping[str, MemoryState | AttentionState]

    @property
    def position(self) -> tuple[int, ...]:
        """Tokens read, per row."""
        return next(iter(self.parts.values())).position

    @property
    def batch(self) -> int:
        return len(self.position)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def tensors(self) -> Iterator[Tensor]:
        for part in self.parts.values():
            yield from part.tensors.values() if isinstance(part, MemoryState) else (part.keys, part.values)

    def map(self, function: Callable[[Tensor], Tensor]) -> BlockState:
        return BlockState({name: part.map(function) for name, part in self.parts.items()})

    def select(self, rows: Rows) -> BlockState:
        """The state of these rows, in this order; rows may repeat (beam search)."""
        indices = checked_rows(rows, self.batch)
        return BlockState({name: part.select(indices) for name, part in self.parts.items()})

    @staticmethod
    def cat(states: Sequence[BlockState]) -> BlockState:
        """Rows of several states of one block, one below the other."""

        def joined(name: str) -> MemoryState | AttentionState:
            parts = [state.parts[name] for state in states]
            memories = [part for part in parts if isinstance(part, MemoryState)]
            return MemoryState.cat(memories) if memories else AttentionState.cat(parts)  # type: ignore[arg-type]

        return BlockState({name: joined(name) for name in states[0].parts})

    def restarted(self, rows: Sequence[bool], fresh: BlockState) -> BlockState:
        """The marked rows as in `fresh`, a state that has read nothing; gradients reach what it starts from."""

        def restart(name: str, part: MemoryState | AttentionState) -> MemoryState | AttentionState:
            start = fresh.parts[name]
            if isinstance(part, MemoryState) and isinstance(start, MemoryState):
                return choose_rows(rows, start, part).with_entries_aligned()
            assert isinstance(part, AttentionState)
            assert isinstance(start, AttentionState)
            return part.replaced(rows, start)

        return BlockState({name: restart(name, part) for name, part in self.parts.items()})


def choose_rows(chosen: Sequence[bool], new: MemoryState, old: MemoryState) -> MemoryState:
    """Rows of `new` where chosen, of `old` elsewhere."""
    if all(chosen):
        return new
    if not any(chosen):
        return old
    position = tuple(a if choose else b for choose, a, b in zip(chosen, new.position, old.position, strict=True))

    def choose(name: str) -> Tensor:
        a, b = new.tensors[name], old.tensors[name]
        if a.shape != b.shape:  # a leaf that grows with what was read, right-aligned
            size = max(a.shape[1], b.shape[1])
            a, b = (take_rows(leaf, [leaf.shape[1] - size] * leaf.shape[0], size) for leaf in (a, b))
        return torch.where(torch.tensor(chosen, device=a.device).reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return new.updated({name: choose(name) for name in new.tensors}, position)
