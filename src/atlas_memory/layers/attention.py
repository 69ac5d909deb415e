"""Attention: causal, over everything or over a window, with rotary positions and a streaming cache.

Rotary positions are relative, so they are counted from the start of a call, or of a block of it, and keys are kept as
they were before rotation: angles stay small, and exact, however long the stream, and rows may differ in what they read.

Shapes: B rows, T tokens, N places kept from before, S sources of keys per place, P persistent tokens, H heads,
D head width, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atlas_memory.checks import check_whole
from atlas_memory.layers.rotary import angles, rotate
from atlas_memory.layers.states import AttentionState
from atlas_memory.ops.packing import Packing, joined_tail, last_rows

# Queries that share one mask: bounds it to this many rows, however long the call.
QUERIES_AT_ONCE = 1024

# Blocks that hold a window, and that are seen by the one after them.
BEFORE = 2


class Attention(nn.Module):
    """Causal attention as a token mixer: (B, T, dim) → (B, T, dim), and the state to go on from.

    window: a token sees itself and the window − 1 tokens before it; None: all of them, and the state grows.
    persistent: learned keys and values without a position, which every token sees. sources: inputs that give keys and
    values at each place; a second one, `beside`, is seen by a token where it sees the place.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int | None = None,
        *,
        persistent: int = 0,
        sources: int = 1,
        theta: float = 10_000.0,
    ) -> None:
        super().__init__()
        _check_arguments(dim, heads, window, persistent, theta)
        self.dim, self.heads, self.window, self.sources, self.theta = dim, heads, window, sources, theta
        self.width = dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.persistent: nn.Parameter | None = None
        if persistent:
            self.persistent = nn.Parameter(torch.randn(2, persistent, heads, self.width) * self.width**-0.5)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, window={self.window}, theta={self.theta}"

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        beside: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        last: bool = False,
        unseen: int = 0,
    ) -> tuple[Tensor, AttentionState]:
        """Mix x (B, T, dim) with what came before it: (B, T, dim), and the state to go on from.

        beside (B, T, dim): the second source. mask (B, T), cu_seqlens (N + 1,): as for `Memory`. last: as for `Block`;
        nothing is mixed, and x comes back. unseen: tokens before x that no later one will see, and that are counted
        only; with `last`.
        """
        inputs = [x] if beside is None else [beside, x]
        if not all(isinstance(part, Tensor) for part in inputs):
            raise ValueError(f"x must be a tensor, got {' and '.join(type(part).__name__ for part in inputs)}.")
        if len(inputs) != self.sources or any(part.ndim != 3 or part.shape[-1] != self.dim for part in inputs):
            shapes = [tuple(part.shape) for part in inputs]
            raise ValueError(f"x must be {self.sources} inputs of shape (batch, tokens, {self.dim}), got {shapes}.")
        packing = Packing(x.shape[0], x.shape[1], mask, cu_seqlens)
        if unseen:
            self._check_unseen(unseen, x.shape[1], last and mask is None and cu_seqlens is None)
        inputs = [packing.unpack(part) for part in inputs]
        both = self.key_value(torch.stack(inputs, dim=2)).unflatten(-1, (2, self.heads, self.width))
        keys, values = both.unbind(-3)  # (B, T, S, H, D)
        if state is None:
            nothing = keys.new_zeros(packing.rows, 0 if self.window is None else self.window - 1, *keys.shape[2:])
            state = AttentionState(nothing, nothing, (0,) * packing.rows)
        else:
            self.check_state(state)
            state.check(packing.rows, keys.device)
            state = state.to(keys.dtype)
            if self.window is None:  # of rows that stood beside longer ones, nothing but their own
                state = state.last(max((0, *state.position)))
        after = self._after(keys, values, state, packing.lengths)
        if last:
            return x, after.advanced(unseen)
        queries = self.query(inputs[-1]).unflatten(-1, (self.heads, self.width))  # (B, T, H, D)
        answers = self._attend(queries, keys, values, state)
        return packing.pack(self.output(answers.flatten(-2))), after

    def check_state(self, state: AttentionState) -> None:
        """Raise unless a state has the shape of this layer's; `AttentionState.check` asks for rows and device."""
        if not isinstance(state, AttentionState):
            raise ValueError(f"state must be an AttentionState or None, got {type(state).__name__}.")
        have, shape = tuple(state.keys.shape[1:]), (self.sources, self.heads, self.width)
        needed = (have[0] if self.window is None else self.window - 1, *shape)
        if have != needed:
            raise ValueError(f"state has keys of shape {have} per row; attention needs {needed}.")

    def _check_unseen(self, unseen: int, tokens: int, fitting: bool) -> None:
        check_whole("unseen", unseen, least=0)
        if not fitting or self.window is None or tokens < self.window - 1:
            raise ValueError(
                f"unseen={unseen} needs last=True, a window that x fills, and no mask or cu_seqlens; "
                "else a later token would see them."
            )

    def _after(self, keys: Tensor, values: Tensor, state: AttentionState, lengths: Sequence[int]) -> AttentionState:
        position = tuple(n + new for n, new in zip(state.position, lengths, strict=True))

        def keep(old: Tensor, new: Tensor) -> Tensor:
            if self.window is not None:  # what is not read yet are zeros on the left, here and there
                return joined_tail(old, new, lengths, self.window - 1)
            ends = [old.shape[1] + n for n in lengths]
            return last_rows(torch.cat([old, new], dim=1), ends, max((0, *position)), position)

        return AttentionState(keep(state.keys, keys), keep(state.values, values), position)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, state: AttentionState) -> Tensor:
        """(B, T, H, D)."""
        count = queries.shape[1]
        if self.window is not None and count >= self.window:
            return self._by_windows(queries, keys, values, state)
        past = state.keys.shape[1] if any(state.position) else 0
        if not past and self.sources == 1 and self.persistent is None:
            return self._look(queries, keys, values, begin=0, visible=None, causal=True)
        seen_keys = torch.cat([state.keys[:, :past], keys], dim=1)
        seen_values = torch.cat([state.values[:, :past], values], dim=1)
        answers = [queries[:, :0]]
        for begin in range(0, count, QUERIES_AT_ONCE):
            end = min(begin + QUERIES_AT_ONCE, count)
            answers.append(
                self._look(
                    queries[:, begin:end],
                    seen_keys[:, : past + end],
                    seen_values[:, : past + end],
                    begin=past + begin,
                    visible=self._visible(past, begin, end, state.position, queries.device),
                )
            )
        return torch.cat(answers, dim=1)

    def _visible(self, past: int, begin: int, end: int, position: Sequence[int], device: torch.device) -> Tensor | None:
        """(B or 1, Q, N + end): whether a token sees a place; None: all of them."""
        rows = torch.arange(begin, end, device=device)[:, None]
        columns = torch.arange(-past, end, device=device)
        complete = all(n >= past for n in position)
        if complete and (begin, end) == (0, 1):
            return None  # one token, right after all that is kept
        visible = columns <= rows
        if self.window is not None:
            visible = visible & (rows - columns < self.window)
        if complete:
            return visible[None]
        return visible & (columns >= -torch.tensor(position, device=device)[:, None, None])

    def _look(
        self, queries: Tensor, keys: Tensor, values: Tensor, begin: int, visible: Tensor | None, causal: bool = False
    ) -> Tensor:
        """Softmax attention of queries (B, Q, H, D), the first at place `begin`, to keys (B, N, S, H, D)."""
        cosine, sine = angles(torch.arange(keys.shape[1], device=keys.device), self.width, self.theta, keys)
        asking = slice(begin, begin + queries.shape[1])
        looking = [
            queries,
            rotate(queries, cosine[asking, None], sine[asking, None]),
            rotate(keys, cosine[:, None, None], sine[:, None, None]).flatten(1, 2),
            values.flatten(1, 2),
        ]
        visible = None if visible is None else visible[:, None]
        return self._softmax([x.transpose(1, 2) for x in looking], visible, causal).transpose(1, 2)

    def _by_windows(self, queries: Tensor, keys: Tensor, values: Tensor, state: AttentionState) -> Tensor:
        """Blocks of half a window: each sees itself and the two before it, the first what was kept. (B, T, H, D).

        With time first and rows among the heads, a block and those before it are a view of all places. Whole windows
        would be fewer blocks, of which each sees a third more places that its mask hides.
        """
        block, before, batch, count = self._block, BEFORE * self._block, *queries.shape[:2]
        blocks = -(-count // block)

        def laid(*parts: Tensor) -> Tensor:
            """(N, S, B, H, D), zeros after the last token."""
            new = torch.cat([part.movedim(0, 2) for part in parts])
            missing = -new.shape[0] % block
            return new if not missing else F.pad(new, (0,) * (2 * new.ndim - 1) + (missing,))

        def seen(x: Tensor) -> Tensor:
            """(N, S, B, H, D) → (blocks, B·H, places S, D)"""
            looked: Tensor = _WithBlocksBefore.apply(x.flatten(2, 3).flatten(0, 1), block * self.sources)
            return looked

        def per_block(x: Tensor) -> Tensor:
            return x.flatten(1, 3).unflatten(0, (blocks, block)).transpose(1, 2)

        # so that what was kept are whole blocks too; nobody sees it
        empty = keys.new_zeros(batch, before - state.keys.shape[1], *keys.shape[2:])
        places = torch.arange(before + blocks * block, device=keys.device)
        cosine, sine = (x[:, None, None, None] for x in angles(places, self.width, self.theta, keys))
        asking = laid(queries[:, :, None])
        looking = [
            per_block(asking),
            per_block(rotate(asking, cosine[before:], sine[before:])),
            seen(rotate(laid(empty, state.keys, keys), cosine, sine)),
            seen(laid(empty, state.values, values)),
        ]
        visible, visible_first = self._visible_blocks(state.position, keys.device)
        if visible_first is None:
            answers = self._softmax(looking, visible)
        else:
            begun = min(BEFORE, blocks)
            first, rest = zip(*(x.split([begun, blocks - begun]) for x in looking), strict=True)
            answers = torch.cat([self._softmax(first, visible_first[:begun]), self._softmax(rest, visible)])
        return answers.unflatten(1, (batch, self.heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :count]

    @property
    def _block(self) -> int:
        return -(-(self.window or 1) // BEFORE)

    def _visible_blocks(self, position: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Whether a token of a block sees a place of those before it or of its own: (1, 1, block, places).

        And for the first blocks (BEFORE, B·H or 1, block, places), if of what was kept some is missing.
        """
        window, before = self.window or 1, BEFORE * self._block
        places = torch.arange(before + self._block, device=device)
        distance = places[before:, None] - places
        visible = (distance >= 0) & (distance < window)
        if all(n >= window - 1 for n in position):
            return visible[None, None], None
        together = len(set(position)) == 1
        rows = torch.tensor(position[:1] if together else position, device=device)
        first = self._block * torch.arange(BEFORE, device=device)[:, None, None, None]  # where each block begins
        read = places + first >= before - rows[:, None, None]  # (BEFORE, B or 1, 1, places)
        return visible[None, None], (visible & read).repeat_interleave(1 if together else self.heads, dim=1)

    def _softmax(self, looking: Sequence[Tensor], visible: Tensor | None, causal: bool = False) -> Tensor:
        """looking: queries (X, heads, Q, D), before rotation and after; keys and values (X, heads, N, D)."""
        plain, queries, keys, values = looking
        if visible is not None and self.sources > 1:
            visible = visible.repeat_interleave(self.sources, dim=-1)
        if self.persistent is not None:
            queries, keys, values = self._with_persistent(plain, queries, keys, values)
            if visible is not None:
                visible = F.pad(visible, (self.persistent.shape[1], 0), value=True)
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, is_causal=causal, scale=self.width**-0.5
        )

    def _with_persistent(
        self, plain: Tensor, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Persistent tokens first. They have no position: they meet the query as it was before rotation.

        Twice the width holds both scores: [rotated, plain] · [key, 0] and [rotated, plain] · [0, persistent].
        """
        assert self.persistent is not None
        learned = self.persistent.to(keys.dtype).transpose(1, 2).repeat(1, keys.shape[1] // self.heads, 1, 1)
        learned = learned[:, None].expand(-1, keys.shape[0], -1, -1, -1)  # (2, X, heads, P, D)
        joined = torch.cat([F.pad(learned[0], (self.width, 0)), F.pad(keys, (0, self.width))], dim=-2)
        return torch.cat([queries, plain], dim=-1), joined, torch.cat([learned[1], values], dim=-2)


def _check_arguments(dim: int, heads: int, window: int | None, persistent: int, theta: float) -> None:
    check_whole("dim", dim)
    check_whole("heads", heads)
    check_whole("persistent", persistent, least=0)
    check_whole("window", window, optional=True)
    if dim % (2 * heads):
        raise ValueError(f"dim={dim} must be an even multiple of heads={heads}: rotary positions turn pairs.")
    if not isinstance(theta, int | float) or not theta > 0:
        raise ValueError(f"theta={theta!r} must be positive.")


class _WithBlocksBefore(torch.autograd.Function):
    """Blocks of `size` places, each with BEFORE before it, as a view: (N, R, D) → (blocks, R, (BEFORE + 1) size, D).

    The gradient of `unfold` is summed place by place; here it is as many parts laid over one another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.unfold(0, (BEFORE + 1) * size, size).mT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        blocks = gradients[0].shape[0]
        parts = gradients[0].transpose(1, 2).split(ctx.size, dim=1)  # (blocks, size, R, D) each
        total = parts[0].new_zeros(blocks + BEFORE, *parts[0].shape[1:])
        for place, part in enumerate(parts):
            total[place : place + blocks] += part
        return total.flatten(0, 1), None
