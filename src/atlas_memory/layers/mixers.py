"""Token mixers: the ways a memory and attention share a block (docs/method.md, "Backbones"). `MIXERS` is their table.

A mixer takes the block's parts, the residual stream x (B, T, dim) with `lengths` real tokens per row, and the block's
state; it answers with what is added to the stream and the new states of the parts. last: only the states are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlas_memory.layers.attention import Attention
from atlas_memory.layers.memory import Memory
from atlas_memory.layers.norm import RMSNorm
from atlas_memory.layers.states import AttentionState, BlockState, choose_rows
from atlas_memory.ops import MemoryState
from atlas_memory.ops.packing import take_rows

States = dict[str, MemoryState | AttentionState]


class Parts(nn.Module):
    """What a mixer is made of: its row of the table says which of these it has."""

    norm: RMSNorm
    memory: Memory
    attention: Attention
    between: RMSNorm  # MAL: before attention
    union: GatedUnion  # MAG, MAC
    stack: TokenStack  # memory tokens
    segment: int  # of MAC and memory tokens


class TokenStack(nn.Module):
    """Layers of attention that read segment after segment, with memory tokens before each and after it.

    They are one module, as what the last of them says of the tokens after a segment is what the first of them is given
    before the next. layers: blocks of attention over a window of a segment and both kinds of memory tokens.
    """

    def __init__(self, layers: Sequence[nn.Module], dim: int, tokens: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.first = nn.Parameter(torch.randn(tokens, dim) * 0.02)  # before the first segment
        self.writing = nn.Parameter(torch.randn(tokens, dim) * 0.02)  # after each

    def forward(
        self, x: Tensor, state: AttentionState | None, mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        """x (B, T, dim) within a segment; the state holds all layers, one beside the other among the heads."""
        count, states = len(self.layers), []
        for place, layer in enumerate(self.layers):
            before = None if state is None else BlockState({"attention": _part(state, place, count)})
            x, after = layer(x, before, mask=mask)
            states.append(after.parts["attention"])
        keys, values = (torch.cat([getattr(part, name) for part in states], dim=3) for name in ("keys", "values"))
        return x, AttentionState(keys, values, states[0].position)

    def begun(self, memory: Tensor) -> AttentionState:
        """Before a segment: memory (B, tokens, dim) is read."""
        return self(memory, None)[1]

    def memory(self, state: AttentionState) -> Tensor:
        """After a segment: what is taken along, (B, tokens, dim)."""
        said: Tensor = self(self.writing.expand(state.batch, -1, -1), state)[0]
        return said


def _part(state: AttentionState, place: int, count: int) -> AttentionState:
    return state.map(lambda tensor: tensor.chunk(count, dim=3)[place])


class GatedUnion(nn.Module):
    """The memory gates attention, both normalised first: norm(attended) · σ(norm(remembered))."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.attended = RMSNorm(dim, eps=eps)
        self.remembered = RMSNorm(dim, eps=eps)

    def forward(self, attended: Tensor, remembered: Tensor) -> Tensor:
        return self.attended(attended) * torch.sigmoid(self.remembered(remembered))


def memory_alone(parts: Parts, x: Tensor, state: States, lengths: Sequence[int], last: bool) -> tuple[Tensor, States]:
    """LMM."""
    mask = real_tokens(lengths, x.shape[1])
    answered = 0 if last and mask is None else None
    y, memory = parts.memory(parts.norm(x), state.get("memory"), mask=mask, answered=answered)
    return y, {"memory": memory}


def attention_alone(
    parts: Parts, x: Tensor, state: States, lengths: Sequence[int], last: bool
) -> tuple[Tensor, States]:
    mask = real_tokens(lengths, x.shape[1])
    unseen = _unseen(parts, x, mask, last)
    y, attention = parts.attention(
        parts.norm(x[:, unseen:]), state.get("attention"), mask=mask, last=last, unseen=unseen
    )
    return y, {"attention": attention}


def memory_as_layer(
    parts: Parts, x: Tensor, state: States, lengths: Sequence[int], last: bool
) -> tuple[Tensor, States]:
    """MAL: attention over the stream to which the memory has added."""
    mask = real_tokens(lengths, x.shape[1])
    unseen = _unseen(parts, x, mask, last)
    answered = x.shape[1] - unseen if unseen else None
    remembered, memory = parts.memory(parts.norm(x), state.get("memory"), mask=mask, answered=answered)
    attended, attention = parts.attention(
        parts.between(x[:, unseen:] + remembered), state.get("attention"), mask=mask, last=last, unseen=unseen
    )
    return remembered + attended, {"memory": memory, "attention": attention}


def memory_as_gate(parts: Parts, x: Tensor, state: States, lengths: Sequence[int], last: bool) -> tuple[Tensor, States]:
    """MAG: both on the same input."""
    x, mask = parts.norm(x), real_tokens(lengths, x.shape[1])
    unseen = _unseen(parts, x, mask, last)
    answered = 0 if last and mask is None else None
    remembered, memory = parts.memory(x, state.get("memory"), mask=mask, answered=answered)
    attended, attention = parts.attention(x[:, unseen:], state.get("attention"), mask=mask, last=last, unseen=unseen)
    y = attended if last else parts.union(attended, remembered)
    return y, {"memory": memory, "attention": attention}


def _unseen(parts: Parts, x: Tensor, mask: Tensor | None, last: bool) -> int:
    """Tokens of x (B, T, dim) that no later one will see, where only states are asked for and no row is padded."""
    window = parts.attention.window
    return 0 if not last or mask is not None or window is None else max(x.shape[1] - window + 1, 0)


def memory_as_context(
    parts: Parts, x: Tensor, state: States, lengths: Sequence[int], last: bool
) -> tuple[Tensor, States]:
    """MAC: by segments, each on its row's own grid.

    Every token asks the memory as it was before the segment, `before`; attention sees these answers beside the tokens
    of the segment; what it makes of both is memorised, and gated by what the memory then knows.
    """
    x = parts.norm(x)
    live, before, looking = _before_the_call(parts, x, state)
    outputs, places = [], _Places(len(lengths), x.shape[1])
    for step in _segments(x, lengths, places, parts.segment, looking.position):
        answers = parts.memory.recall(step.tokens, before)
        before = parts.memory.asked(step.tokens, before, step.counts)
        attended, looking = parts.attention(step.tokens, looking, beside=answers, mask=step.mask)
        remembered, live = parts.memory(attended, live, mask=step.mask)
        outputs.append(parts.union(attended, remembered))
        before, looking = choose_rows(step.ended, live, before), looking.restarted(step.ended)
    return places.gather(torch.cat(outputs, dim=1)), {"memory": live, "before": before, "attention": looking}


def _before_the_call(parts: Parts, x: Tensor, state: States) -> tuple[MemoryState, MemoryState, AttentionState]:
    live, before, looking = (state.get(name) for name in ("memory", "before", "attention"))
    if isinstance(live, MemoryState) and isinstance(before, MemoryState) and isinstance(looking, AttentionState):
        return live, before, looking
    nothing = x[:, :0]
    _, live = parts.memory(nothing)
    _, looking = parts.attention(nothing, beside=nothing)
    return live, live, looking


def memory_tokens(parts: Parts, x: Tensor, state: States, lengths: Sequence[int], last: bool) -> tuple[Tensor, States]:
    """Segment-recurrent attention (RMT): between segments nothing remains but the memory tokens."""
    stack, tokens, batch = parts.stack, len(parts.stack.first), len(lengths)
    read, live = state.get("read"), state.get("attention")
    if not isinstance(read, AttentionState) or not isinstance(live, AttentionState):
        nothing = x.new_zeros(batch, 0, 1, 1, 1)
        read, live = AttentionState(nothing, nothing, (0,) * batch), stack.begun(stack.first.expand(batch, -1, -1))
    outputs, places = [], _Places(batch, x.shape[1])
    for step in _segments(x, lengths, places, parts.segment, [n - tokens for n in live.position]):
        answers, live = stack(step.tokens, live, step.mask)
        outputs.append(answers)
        if any(step.ended):
            live = live.replaced(step.ended, stack.begun(stack.memory(live)))
    position = tuple(n + new for n, new in zip(read.position, lengths, strict=True))
    return parts.norm(places.gather(torch.cat(outputs, dim=1))), {
        "read": AttentionState(read.keys, read.values, position),
        "attention": live,
    }


class _Step(NamedTuple):
    """Tokens of every row that lie in one segment of it."""

    tokens: Tensor  # (B, T, dim)
    mask: Tensor | None
    counts: list[int]  # real tokens per row
    ended: list[bool]  # whether the row's segment is full with them


def _segments(x: Tensor, lengths: Sequence[int], places: _Places, size: int, filled: Sequence[int]) -> Iterator[_Step]:
    """x (B, T, dim) step by step, each row on its own grid of segments, of which the first may be filled in part."""
    starts, room = [0] * len(lengths), [size - n for n in filled]
    while True:
        counts = [min(free, n - start) for free, n, start in zip(room, lengths, starts, strict=True)]
        width = max((0, *counts))
        places.add(starts, counts, width)
        room = [free - n for free, n in zip(room, counts, strict=True)]
        yield _Step(take_rows(x, starts, width, counts), real_tokens(counts, width), counts, [n == 0 for n in room])
        room = [free or size for free in room]
        starts = [start + n for start, n in zip(starts, counts, strict=True)]
        if all(start == n for start, n in zip(starts, lengths, strict=True)):
            return


class _Places:
    """Where each token of the rows stands among the outputs of the steps, one after another."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.places = torch.zeros(rows, tokens, dtype=torch.long)
        self.offset = 0
        self.in_order = True  # every row took part in every step in full

    def add(self, starts: Sequence[int], counts: Sequence[int], width: int) -> None:
        for row, (start, n) in enumerate(zip(starts, counts, strict=True)):
            self.places[row, start : start + n] = torch.arange(self.offset, self.offset + n)
            self.in_order &= n == width
        self.offset += width

    def gather(self, outputs: Tensor) -> Tensor:
        if self.in_order and self.offset == self.places.shape[1]:
            return outputs
        rows = torch.arange(outputs.shape[0], device=outputs.device)[:, None]
        return outputs[rows, self.places.to(outputs.device)]


def real_tokens(lengths: Sequence[int], tokens: int) -> Tensor | None:
    """The mask (B, T) of right-padded rows, on the host; None where nothing is padding."""
    if all(n == tokens for n in lengths):
        return None
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


class Mixer(NamedTuple):
    run: Callable[[Parts, Tensor, States, Sequence[int], bool], tuple[Tensor, States]]
    states: tuple[str, ...]  # of the parts; the first counts the tokens
    memory: bool = False
    attention: str | None = None  # "full", "window", or "segment", which has the memory's answers as a second source
    between: bool = False
    union: bool = False
    stack: bool = False


MIXERS: dict[str, Mixer] = {
    "lmm": Mixer(memory_alone, ("memory",), memory=True),
    "mal": Mixer(memory_as_layer, ("memory", "attention"), memory=True, attention="window", between=True),
    "mag": Mixer(memory_as_gate, ("memory", "attention"), memory=True, attention="window", union=True),
    "mac": Mixer(memory_as_context, ("memory", "before", "attention"), memory=True, attention="segment", union=True),
    "full_attention": Mixer(attention_alone, ("attention",), attention="full"),
    "sliding_attention": Mixer(attention_alone, ("attention",), attention="window"),
    "memory_tokens": Mixer(memory_tokens, ("read", "attention"), stack=True),
}
