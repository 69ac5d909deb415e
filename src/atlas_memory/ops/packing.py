"""Rows of different lengths, positions and paddings → one layout: right-padded rows with a length each.

Lengths and positions are host integers: they decide shapes and schedules, and no device is ever asked for them in the
middle of the work. Shapes: B rows, T tokens; x (B, T, ...).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Lengths = Sequence[int]

# Packed sequences are worked on side by side as long as that takes at most so many times their tokens.
MOST_PADDING = 2


def whole_numbers(name: str, numbers: Tensor | Sequence[int]) -> list[int]:
    """As integers of the host; fractions are refused, not cut off."""
    try:
        return [operator.index(n) for n in (numbers.tolist() if isinstance(numbers, Tensor) else numbers)]
    except TypeError as error:
        raise ValueError(f"{name}={numbers!r} must hold whole numbers.") from error


def all_alike(numbers: Lengths) -> bool:
    """Of at least one. Compared one by one: compilers count positions in symbols, which a set would pin down."""
    return len(numbers) > 0 and all(n == numbers[0] for n in numbers)


def take_rows(x: Tensor, starts: Lengths, size: int, lengths: Lengths | None = None) -> Tensor:
    """Row r of the answer is x[r, starts[r] : starts[r] + size] (B, size, ...); zero outside of x.

    With `lengths`, only the first lengths[r] places of row r are kept, the rest is zero.
    """
    total = x.shape[1]
    if lengths is None:
        lengths = [size] * len(starts)
    if all_alike(starts):  # as a rule; indices would have to be sent to the device
        alike = all_alike(lengths)
        begin, end = max(starts[0], 0), min(starts[0] + (lengths[0] if alike else max(lengths)), total)
        if begin < end:
            kept = x if end - begin == total else x.narrow(1, begin, end - begin)  # a view costs a copy backward
            before = begin - starts[0]
            taken = _padded(kept, before, size - before - (end - begin))
            return taken if alike else _kept(taken, torch.arange(size) < torch.tensor(lengths)[:, None])
    if size == 0 or total == 0:
        return x.new_zeros(x.shape[0], size, *x.shape[2:])
    places = torch.arange(size)
    source = places + torch.tensor(starts)[:, None]
    valid = (source >= 0) & (source < total) & (places < torch.tensor(lengths)[:, None])
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    taken = x[rows, source.clamp(0, total - 1).to(x.device)]
    return _kept(taken, valid)


def last_rows(x: Tensor, ends: Lengths, size: int, lengths: Lengths) -> Tensor:
    """The last lengths[r] ≤ size places of row r before ends[r], right-aligned in (B, size, ...), zeros before.

    A copy: a view would keep all of x, and change with it.
    """
    if all_alike(lengths):
        taken = take_rows(x, [end - lengths[0] for end in ends], lengths[0])
        return _padded(taken, size - lengths[0], 0) if lengths[0] < size else taken.clone()
    taken = take_rows(x, [end - size for end in ends], size)
    valid = torch.arange(size) >= size - torch.tensor(lengths)[:, None]
    return _kept(taken, valid)


def _kept(x: Tensor, places: Tensor) -> Tensor:
    """x (B, T, ...) at these places (B, T), which the host knows; zero elsewhere, whatever stands there."""
    return torch.where(places.to(x.device).reshape(*places.shape, *[1] * (x.ndim - 2)), x, 0)


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """Zeros before and after the places of x (B, T, ...); x itself where there are none."""
    return x if before == after == 0 else F.pad(x, (*[0] * (2 * (x.ndim - 2)), before, after))


def joined_tail(old: Tensor, new: Tensor, lengths: Lengths, size: int) -> Tensor:
    """The last `size` places of each row of old (B, N, ...) with the first lengths[r] of new (B, T, ...) after it."""
    count = new.shape[1]
    if all(n == count for n in lengths):  # no need to join all of them
        recent = new[:, max(count - size, 0) :]
        return torch.cat([old[:, old.shape[1] + recent.shape[1] - size :], recent], dim=1)
    return last_rows(torch.cat([old, new], dim=1), [old.shape[1] + n for n in lengths], size, [size] * len(lengths))


class Packing:
    """How the tokens a caller gave lie in rows: `unpack` before the work, `pack` after it."""

    def __init__(self, batch: int, tokens: int, mask: Tensor | None, cu_seqlens: Tensor | Lengths | None) -> None:
        if mask is not None and cu_seqlens is not None:
            raise ValueError("mask and cu_seqlens exclude each other: give the padding or the packing, not both.")
        self.batch, self.tokens = batch, tokens
        self.bounds: list[int] | None = None
        self.starts, self.lengths = [0] * batch, [tokens] * batch
        if cu_seqlens is not None:
            self.bounds = _checked_bounds(cu_seqlens, batch, tokens)
            self.starts = self.bounds[:-1]
            self.lengths = [end - start for start, end in itertools.pairwise(self.bounds)]
        elif mask is not None:
            self.starts, self.lengths = _checked_mask(mask, batch, tokens)

    @property
    def plain(self) -> bool:
        """Whether the rows are already right-padded rows of full length."""
        return self.bounds is None and all(n == self.tokens for n in self.lengths)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def groups(self) -> list[list[int]]:
        """Packed sequences by like length: side by side, each costs as much as the longest. As a rule, all are one."""
        if self.bounds is None or self.rows * max(self.lengths) <= MOST_PADDING * self.tokens:
            return [list(range(self.rows))]
        sizes = [max(n, 1).bit_length() for n in self.lengths]
        return [[row for row, size in enumerate(sizes) if size == chosen] for chosen in sorted(set(sizes))]

    def part(self, numbers: Sequence[int]) -> Packing:
        """Of some packed sequences, one after the other."""
        bounds = [0, *itertools.accumulate(self.lengths[number] for number in numbers)]
        return Packing(1, bounds[-1], None, bounds)

    def unpack(self, x: Tensor) -> Tensor:
        """(B, T, ...) → (rows, longest, ...)."""
        if self.plain:
            return x
        if self.bounds is not None:
            x = x.expand(self.rows, *x.shape[1:])
        return take_rows(x, self.starts, max(self.lengths), self.lengths)

    def pack(self, y: Tensor) -> Tensor:
        """(rows, longest, ...) → (B, T, ...), zero at padding."""
        if self.plain:
            return y
        if self.bounds is not None:
            return torch.cat([y[r, :n] for r, n in enumerate(self.lengths)])[None]
        real = take_rows(y, [0] * self.rows, y.shape[1], self.lengths)
        return take_rows(real, [-start for start in self.starts], self.tokens)


def _checked_bounds(cu_seqlens: Tensor | Lengths, batch: int, tokens: int) -> list[int]:
    bounds = whole_numbers("cu_seqlens", cu_seqlens)
    if batch != 1:
        raise ValueError(f"cu_seqlens needs one row that holds all sequences, got a batch of {batch}.")
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens={bounds} must rise from 0 to the number of tokens, {tokens}.")
    return bounds


def _checked_mask(mask: Tensor, batch: int, tokens: int) -> tuple[list[int], list[int]]:
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a tensor, got {type(mask).__name__}.")
    if tuple(mask.shape) != (batch, tokens):
        raise ValueError(f"mask must have shape (batch, tokens) = ({batch}, {tokens}), got {tuple(mask.shape)}.")
    real = mask.detach().to("cpu") != 0
    lengths = real.sum(-1).tolist()
    starts = [int(row.to(torch.uint8).argmax()) if n else 0 for row, n in zip(real, lengths, strict=True)]
    for r, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        if not bool(real[r, start : start + n].all()):
            raise ValueError(f"mask row {r} has padding between real tokens; only left and right padding is accepted.")
    return starts, lengths
