"""Memory: a sequence layer that learns while it reads.

x ─► q, k, v projection ─► short causal convolution ─► normalise q, k ─► memorize ─► norm ─► output gate ─► projection
x ─► gates ───────────────────────────────────────────────┘

Shapes: B batch, T tokens, H heads, D key width, V value width, K convolution width.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atlas_memory.checks import check_whole
from atlas_memory.layers.gates import TokenGates
from atlas_memory.layers.groups import read_in_groups
from atlas_memory.layers.initial_weights import RANK, InitialWeights
from atlas_memory.layers.rotary import angles, rotate
from atlas_memory.ops import Gates, MemoryState, Monitors, memorize, memorize_reference, recall
from atlas_memory.ops.features import starting_sharpness, taylor_coefficients
from atlas_memory.ops.idle import busy_tokens, faded_momentum
from atlas_memory.ops.packing import Packing, joined_tail
from atlas_memory.ops.stability import all_finite, cap, normalise, root_mean_square_norm
from atlas_memory.spec import MemorySpec, presets

# Rows of x and values beyond these norms are scaled down to them, so that no finite input can overflow what follows.
# Normalised inputs are many orders of magnitude below: for them both are the identity.
LARGEST_INPUT = 1e6
LARGEST_VALUE = 1e4

# Of the exponential's sharpness β: at 1,000 two keys an angle of five degrees apart are strangers.
LARGEST_ROOT = 1000**0.5

# Of attention, by default.
ROTARY = 10_000.0


class Memory(nn.Module):
    """A neural long-term memory as a token mixer: (B, T, dim) → (B, T, dim), and a state of constant size.

    preset: a name of `presets.names()`; any field of MemorySpec can be overridden by keyword. spec: given instead of a
    preset. convolution: width of the causal convolution, 1 for none. initial_rank: of the initial weights of layers
    that see wide features: how many pairs they are made of. rotary: the base of rotary positions, None for none;
    memories with infinite features have them unless told otherwise, as attention does.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 4,
        preset: str = "atlas",
        *,
        spec: MemorySpec | None = None,
        convolution: int = 4,
        initial_rank: int = RANK,
        rotary: float | str | None = "fitting",
        **overrides: Any,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "heads": heads, "convolution": convolution, "initial_rank": initial_rank}
        for name, value in sizes.items():
            check_whole(name, value)
        if spec is not None and not isinstance(spec, MemorySpec):
            raise ValueError(f"spec={spec!r} must be a MemorySpec; presets are named by `preset`.")
        self.spec = presets.make(preset, **overrides) if spec is None else spec.replace(**overrides)
        self.dim, self.heads, self.convolution = dim, heads, convolution
        self.rotary: float | None = ROTARY if self.spec.kernel else None
        if rotary is None or (isinstance(rotary, int | float) and rotary > 1):
            self.rotary = rotary
        elif rotary != "fitting":
            raise ValueError(f"rotary={rotary!r} must be a number above 1, None, or 'fitting'.")
        key_width, value_width = self.spec.key_width, self.spec.value_width
        self.widths = [heads * key_width, heads * key_width, heads * value_width]
        self.tokens = nn.Linear(dim, sum(self.widths), bias=False)
        self.mixing = nn.Parameter(_starting_convolution(sum(self.widths), convolution)) if convolution > 1 else None
        self.gates = TokenGates(self.spec, dim, heads)
        self.coefficients: nn.Parameter | None = None
        if self.spec.feature == "polynomial":
            self.coefficients = nn.Parameter(torch.tensor(taylor_coefficients(self.spec.degree)))
        if self.spec.feature == "exponential":  # the root of the sharpness
            self.coefficients = nn.Parameter(torch.full((1,), math.sqrt(starting_sharpness(self.spec))))
        self.initial = InitialWeights(self.spec, heads, initial_rank)
        self.norm = nn.Parameter(torch.ones(heads, value_width))
        self.output_gate = nn.Linear(dim, heads * value_width, bias=False)
        self.output = nn.Linear(heads * value_width, dim, bias=False)
        self.check_finite: bool | None = None  # for calls that leave it open; training handles divergence itself

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, spec={self.spec}"

    def forward(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        monitors: Monitors | None = None,
        recompute: bool | None = None,
        check_finite: bool | None = None,
        answered: int | None = None,
    ) -> tuple[Tensor, MemoryState]:
        """Read x (B, T, dim) and answer every token: (B, T, dim), and the state to go on from.

        state: of an earlier call; split anywhere, the numbers are those of one call. mask (B, T): nonzero at real
        tokens; padding may stand left or right. cu_seqlens (N + 1,): x is one row of N packed sequences; the state has
        a row for each. monitors: filled on request. recompute: see `memorize`. check_finite: reject NaN and infinities;
        None: on the CPU. answered: (B, answered, dim), the last tokens alone, where no row is padded or packed.
        """
        if answered is not None:
            _check_answered(answered, x, mask, cu_seqlens)

        operator = functools.partial(memorize, recompute=recompute, monitors=monitors)
        watched = monitors is not None  # every token is told of, and packed sequences side by side
        read = functools.partial(self._read_rows, operator, answered, not watched)
        return self._read(read, x, state, mask, cu_seqlens, check_finite, together=watched)

    def reference(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        check_finite: bool | None = None,
    ) -> tuple[Tensor, MemoryState]:
        """As `forward`, by the slow definition."""
        read = functools.partial(self._read_rows, memorize_reference, None, False)
        return self._read(read, x, state, mask, cu_seqlens, check_finite)

    def recall(self, x: Tensor, state: MemoryState, *, check_finite: bool | None = None) -> Tensor:
        """Ask without writing: every token of x (B, T, dim) reads the state as it is. (B, T, dim)."""
        self._check_input(x, check_finite)
        if not isinstance(state, MemoryState):
            raise ValueError(f"state must be a MemoryState, got {type(state).__name__}.")
        state.check(self.spec, x.shape[0], x.device)
        return self._recall(cap(x, LARGEST_INPUT), state)

    def _recall(self, x: Tensor, state: MemoryState) -> Tensor:
        width = self.widths[0]  # of the queries; nobody asks for keys and values
        raw = F.linear(x, self.tokens.weight[:width])
        mixed = self._convolve(raw, self._tail(state, x)[..., :width])
        last = torch.tensor([max(n - 1, 0) for n in state.position])[:, None]  # asked from where reading stands
        queries = self._addresses(_working(mixed), last)
        answers = recall(self.spec, queries, state, coefficients=self._coefficients(), check_finite=False)
        return self._output(answers, x)

    def asked(self, x: Tensor, state: MemoryState, lengths: Sequence[int]) -> MemoryState:
        """The state after `recall` of x (B, T, dim), lengths[r] tokens of row r: the convolution goes on from there."""
        raw = self.tokens(cap(x, LARGEST_INPUT))
        return state.updated(self._new_tail(raw, self._tail(state, x), lengths))

    def _read(
        self,
        read: Callable[[Packing, Tensor, MemoryState | None], tuple[Tensor, MemoryState]],
        x: Tensor,
        state: MemoryState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | Sequence[int] | None,
        check_finite: bool | None,
        together: bool = False,
    ) -> tuple[Tensor, MemoryState]:
        """together: packed sequences side by side, whatever their lengths."""
        self._check_input(x, check_finite)
        packing = Packing(x.shape[0], x.shape[1], mask, cu_seqlens)
        if state is not None:
            if not isinstance(state, MemoryState):
                raise ValueError(f"state must be a MemoryState or None, got {type(state).__name__}.")
            state.check(self.spec, packing.rows, x.device)
        return read(packing, x, state) if together else read_in_groups(read, MemoryState.cat, packing, x, state)

    def _read_rows(
        self,
        operator: Callable[..., tuple[Tensor, MemoryState]],
        answered: int | None,
        skipping: bool,
        packing: Packing,
        x: Tensor,
        state: MemoryState | None,
    ) -> tuple[Tensor, MemoryState]:
        """skipping: tokens at both ends that no row writes are asked only, and those that nobody asks counted only."""
        x = cap(packing.unpack(x), LARGEST_INPUT)
        gates, tokens = self.gates(x), x.shape[1]
        wanted = tokens if answered is None else answered
        busy = None
        if state is not None and skipping and packing.plain and self.rotary is None:
            busy = busy_tokens(self.spec, gates, state)
        if state is None or busy is None:
            y, after = self._memorize(operator, x, gates, state, packing.lengths, wanted)
            return packing.pack(y), after
        answers = []
        for begin, end in itertools.pairwise((0, *busy, tokens)):
            size, unasked = end - begin, min(max(tokens - wanted - begin, 0), end - begin)
            if size == 0:
                continue
            own = Gates(*(None if gate is None else gate[:, begin:end] for gate in gates))
            if (begin, end) == busy:
                lengths = [size] * packing.rows
                y, state = self._memorize(operator, x[:, begin:end], own, state, lengths, size - unasked)
            else:
                y, state = self._pass_by(x[:, begin:end], state, unasked)
                state = state.updated(faded_momentum(self.spec, own, state))
            answers.append(y)
        return torch.cat(answers, dim=1), state

    def _pass_by(self, x: Tensor, state: MemoryState, unasked: int) -> tuple[Tensor, MemoryState]:
        """Answers to tokens (B, T, dim) that leave the weights as they are, but for the first ones; and the state."""
        state = self._passed(x[:, :unasked], state)
        return self._recall(x[:, unasked:], state), self._passed(x[:, unasked:], state)

    def _memorize(
        self,
        operator: Callable[..., tuple[Tensor, MemoryState]],
        x: Tensor,
        gates: Gates,
        state: MemoryState | None,
        lengths: Sequence[int],
        answered: int,
    ) -> tuple[Tensor, MemoryState]:
        """x (B, T, dim), right-padded: (B, answered, dim), and the state to go on from."""
        tail = self._tail(state, x)
        raw = self.tokens(x)
        before = torch.tensor((0,) * len(lengths) if state is None else state.position)[:, None]
        queries, keys, values = self._split(self._convolve(raw, tail), before + torch.arange(x.shape[1]))
        unasked = x.shape[1] - answered
        answers, after = operator(
            self.spec,
            queries,
            keys,
            values,
            gates,
            self.initial() if state is None else None,
            state=state,
            coefficients=self._coefficients(),
            lengths=lengths,
            check_finite=False,
            **({"answered": answered} if unasked else {}),
        )
        after = after.updated(self._new_tail(raw, tail, lengths))
        return self._output(answers[:, unasked:], x[:, unasked:]), after

    def _passed(self, x: Tensor, state: MemoryState) -> MemoryState:
        """The state after tokens (B, T, dim) that leave the weights as they are."""
        seen = x[:, max(x.shape[1] - self.convolution + 1, 0) :]
        tail = self._new_tail(self.tokens(seen), self._tail(state, x), [seen.shape[1]] * state.batch)
        return state.updated(tail, [n + x.shape[1] for n in state.position])

    def _check_input(self, x: Tensor, check_finite: bool | None) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a tensor, got {type(x).__name__}.")
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must have shape (batch, tokens, {self.dim}), got {tuple(x.shape)}.")
        if x.shape[0] == 0:
            raise ValueError(f"x must have at least one row, got shape {tuple(x.shape)}.")
        weight = self.tokens.weight
        if x.device != weight.device:
            raise ValueError(f"x is on {x.device}, the layer on {weight.device}.")
        if not x.is_floating_point() or (x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type)):
            raise ValueError(f"x must be {weight.dtype} like the layer's parameters, got {x.dtype}.")
        check_finite = self.check_finite if check_finite is None else check_finite
        eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if (eager_cpu if check_finite is None else check_finite) and not all_finite(x):
            raise ValueError("x holds NaN or infinite numbers; only finite ones are accepted.")

    def _tail(self, state: MemoryState | None, x: Tensor) -> Tensor:
        """The convolution's inputs before the first token (B, K − 1, channels)."""
        if state is None or self.convolution == 1:
            return x.new_zeros(x.shape[0], self.convolution - 1, sum(self.widths))
        tail = state.tensors.get("conv.tail")
        if tail is None or tail.shape[1:] != (self.convolution - 1, sum(self.widths)):
            shape, needed = None if tail is None else tuple(tail.shape[1:]), (self.convolution - 1, sum(self.widths))
            raise ValueError(f"state has conv.tail of shape {shape} per row; this layer needs {needed}.")
        return tail.to(x.dtype)

    def _new_tail(self, raw: Tensor, tail: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
        if self.convolution == 1:
            return {}
        new = joined_tail(tail.to(raw.dtype), raw, lengths, self.convolution - 1)
        return {"conv.tail": new if new.dtype == torch.float64 else new.float()}

    def _convolve(self, raw: Tensor, tail: Tensor) -> Tensor:
        """Causal depthwise convolution (B, T, channels) of all channels or the first of them, then SiLU.

        Written out: conv1d wants the channels before the tokens, and all that follows would read across the grain.
        """
        if self.mixing is None:
            return F.silu(raw)
        both = torch.cat([tail.to(raw.dtype), raw], dim=1)
        # Each tap in one piece: kernels that step through a strided one cannot take several channels at once.
        weights = self.mixing[: raw.shape[-1], 0].to(raw.dtype).mT.contiguous()  # (K, channels)
        mixed = raw * weights[-1]
        for place, weight in enumerate(weights[:-1]):
            mixed = torch.addcmul(mixed, both[:, place : place + raw.shape[1]], weight)
        return F.silu(mixed)

    def _split(self, mixed: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (B, T, H, D), normalised, and values (B, T, H, V), in the working precision.

        places (B, T or 1): of the tokens in their sequences.
        """
        asked, values = _working(mixed).split([sum(self.widths[:2]), self.widths[2]], -1)
        queries, keys = self._addresses(asked, places).split(self.heads, dim=-2)
        return queries, keys, cap(values.unflatten(-1, (self.heads, -1)), LARGEST_VALUE)

    def _addresses(self, mixed: Tensor, places: Tensor) -> Tensor:
        """Queries, or queries and keys (B, T, H or 2 H, D): normalised, and turned where positions matter."""
        made = normalise(mixed.unflatten(-1, (-1, self.spec.key_width)))
        if self.rotary is None:
            return made
        return rotate(made, *angles(places[..., None].to(mixed.device), self.spec.key_width, self.rotary, made))

    def _coefficients(self) -> Tensor | None:
        """The polynomial's, scaled so that φ of a unit vector is a unit vector; or the exponential's sharpness."""
        if self.coefficients is None:
            return None
        if self.spec.feature == "polynomial":
            return normalise(self.coefficients)
        return self.coefficients.clamp(-LARGEST_ROOT, LARGEST_ROOT).square()

    def _output(self, answers: Tensor, x: Tensor) -> Tensor:
        normed = root_mean_square_norm(answers, self.norm.to(answers.dtype)).flatten(-2)
        gate = F.silu(self.output_gate(x))
        return self.output(normed.to(gate.dtype) * gate)


def _working(x: Tensor) -> Tensor:
    """In the working precision."""
    return x if x.dtype == torch.float64 else x.float()


def _check_answered(answered: int, x: Tensor, mask: Tensor | None, cu_seqlens: Any) -> None:
    check_whole("answered", answered, least=0)
    if mask is not None or cu_seqlens is not None:
        raise ValueError(f"answered={answered} is for rows without padding; leave out mask and cu_seqlens.")
    if isinstance(x, Tensor) and x.ndim == 3 and answered > x.shape[1]:
        raise ValueError(f"answered={answered} must be at most the {x.shape[1]} tokens of x.")


def _starting_convolution(channels: int, width: int) -> Tensor:
    """(channels, 1, K): the token itself, and enough of its neighbours to bind a name to what follows it.

    With neighbours at a tenth of this size, a two-layer model took more than twice the steps to find that it can.
    """
    weight = torch.randn(channels, 1, width) * 0.3
    weight[..., -1] += 0.7
    return weight
