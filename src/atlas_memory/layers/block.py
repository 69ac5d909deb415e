"""Block: RMSNorm, mixer, RMSNorm, SwiGLU, each added to the stream. Shapes: B batch, T tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from atlas_memory.checks import check_whole
from atlas_memory.layers.attention import Attention
from atlas_memory.layers.groups import read_in_groups
from atlas_memory.layers.memory import Memory
from atlas_memory.layers.mixers import MIXERS, GatedUnion, Parts, TokenStack
from atlas_memory.layers.norm import RMSNorm
from atlas_memory.layers.states import AttentionState, BlockState
from atlas_memory.ops import MemoryState
from atlas_memory.ops.packing import Packing


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) · up x)."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(Parts):
    """One layer of a model: (B, T, dim) → (B, T, dim), and the state to go on from.

    mixer: a row of MIXERS. heads, window, segment, persistent, theta: of attention, where the mixer has one: window for
    MAL, MAG and sliding attention, segment for MAC. tokens, depth: of memory tokens between segments, and of the layers
    that share them. preset, memory_heads, memory: of the memory, where it has one; `memory` holds further arguments of
    Memory, any field of MemorySpec among them. inner: hidden width of the SwiGLU.
    """

    def __init__(
        self,
        dim: int,
        mixer: str = "mag",
        *,
        inner: int,
        heads: int = 4,
        window: int = 512,
        segment: int = 256,
        persistent: int = 0,
        tokens: int = 8,
        depth: int = 1,
        theta: float = 10_000.0,
        preset: str = "atlas",
        memory_heads: int = 4,
        memory: Mapping[str, Any] | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if mixer not in MIXERS:
            raise ValueError(f"mixer={mixer!r} is unknown; known: {', '.join(MIXERS)}.")
        for name, value in {"inner": inner, "segment": segment, "tokens": tokens, "depth": depth}.items():
            check_whole(name, value)
        if not eps > 0:
            raise ValueError(f"eps={eps!r} must be positive.")
        row, self.mixer, self.segment = MIXERS[mixer], mixer, segment
        self.dim = dim
        self.norm = RMSNorm(dim, eps=eps)
        if row.memory:
            self.memory = Memory(dim, memory_heads, preset, **(memory or {}))
        if row.attention is not None:
            size = {"full": None, "window": window, "segment": segment}[row.attention]
            sources = 2 if row.attention == "segment" else 1
            self.attention = Attention(dim, heads, size, persistent=persistent, sources=sources, theta=theta)
        if row.attention == "segment" and segment % self.memory.spec.anchor_chunk:
            chunk = self.memory.spec.anchor_chunk
            raise ValueError(f"segment={segment} must be a multiple of the memory's chunk={chunk}.")
        if row.stack:
            size = segment + 2 * tokens  # of which a token sees all
            kept: dict[str, Any] = {
                "inner": inner,
                "heads": heads,
                "window": size,
                "persistent": persistent,
                "theta": theta,
                "eps": eps,
            }
            self.stack = TokenStack([Block(dim, "sliding_attention", **kept) for _ in range(depth)], dim, tokens)
        if row.between:
            self.between = RMSNorm(dim, eps=eps)
        if row.union:
            self.union = GatedUnion(dim, eps)
        self.feed_forward_norm = RMSNorm(dim, eps=eps)
        self.feed_forward = FeedForward(dim, inner)

    def forward(
        self,
        x: Tensor,
        state: BlockState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        last: bool = False,
    ) -> tuple[Tensor, BlockState]:
        """Read x (B, T, dim): (B, T, dim), and the state to go on from; mask and cu_seqlens as for `Memory`.

        last: only the state is asked for; what the output alone needs is left out, and x means nothing afterwards.
        """
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != self.dim:
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must be a tensor of shape (batch, tokens, {self.dim}), got {given}.")
        packing = Packing(x.shape[0], x.shape[1], mask, cu_seqlens)
        self.check_state(state)
        return read_in_groups(functools.partial(self._read, last), BlockState.cat, packing, x, state)

    def _read(self, last: bool, packing: Packing, x: Tensor, state: BlockState | None) -> tuple[Tensor, BlockState]:
        x = packing.unpack(x)
        before = {} if state is None else dict(state.parts)
        update, states = MIXERS[self.mixer].run(self, x, before, packing.lengths, last)
        if not last:
            x = x + update
            x = x + self.feed_forward(self.feed_forward_norm(x))
        return packing.pack(x), BlockState(states)

    def check_state(self, state: BlockState | None) -> None:
        """Raise unless this block can go on from there; rows and devices are checked by the parts."""
        if state is None:
            return
        if not isinstance(state, BlockState):
            raise ValueError(f"state must be a BlockState or None, got {type(state).__name__}.")
        expected = MIXERS[self.mixer].states
        if set(state.parts) != set(expected):
            raise ValueError(f"state has parts {sorted(state.parts)}; a {self.mixer!r} block has {sorted(expected)}.")
        for part in state.parts.values():
            if isinstance(part, MemoryState) and part.spec != self.memory.spec:
                differences = part.spec.differences(self.memory.spec)
                raise ValueError(f"state belongs to another memory; fields differ: {differences}.")
            if isinstance(part, AttentionState) and MIXERS[self.mixer].attention is not None:
                self.attention.check_state(part)
