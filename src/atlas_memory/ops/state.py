"""MemoryState: everything a memory needs to go on reading.

One flat tree of tensors, every leaf batch-first, and the number of tokens each row has read:

    weights.<site>    (B, H, out, in)       fast weights at the anchor
    momentum.<site>   (B, H, out, in)       optimizers that carry one
    pending           (B, H)                Muon: the steps gathered since its last update point
    window.keys …     (B, W−1, H, D)        the tokens before the anchor that the window still reaches; φ*: see cache
    open.keys …       (B, C−1, H, D)        tokens and gates since the anchor; right-aligned, zeros before
    pairs             (B, H, P, D)          φ*: the keys of the pairs an infinite layer starts from
    cache.keys        (B, M, H, D)          φ*: the keys of the tokens up to the anchor; right-aligned, zeros before
    cache.<site>      (B, M, H, out)        φ*: their vectors. Caches grow, up to the horizon if there is one
    conv.<name>       (B, K−1, channels)    the layer's convolution tails

States are never changed in place.
"""

from __future__ import annotations

import dataclasses
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save as serialise
from torch import Tensor

from atlas_memory.files import read_tensors, write_whole
from atlas_memory.ops.entries import retract_site
from atlas_memory.ops.packing import whole_numbers
from atlas_memory.spec import MemorySpec

FORMAT = "atlas-memory-state"
FORMAT_VERSION = 1


Rows = Tensor | Sequence[int]


class Verbs:
    """What every state can do once `map` is known."""

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same state with a function applied to every tensor."""

    def detach(self) -> Self:
        return self.map(Tensor.detach)

    def clone(self) -> Self:
        return self.map(Tensor.clone)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Device or dtype, as Tensor.to."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))


@dataclasses.dataclass(frozen=True)
class MemoryState(Verbs):
    spec: MemorySpec
    tensors: Mapping[str, Tensor]
    position: tuple[int, ...]  # tokens read, per row

    @property
    def tokens_seen(self) -> Tensor:
        """(B,) tokens read by each row."""
        return torch.tensor(self.position, dtype=torch.long)

    @property
    def batch(self) -> int:
        return len(self.position)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def fill(self) -> tuple[int, ...]:
        """Tokens in the open chunk, per row."""
        return tuple(n % self.spec.anchor_chunk for n in self.position)

    @property
    def cached(self) -> tuple[int, ...]:
        """Tokens an infinite layer keeps one by one, per row."""
        anchors = [n - fill for n, fill in zip(self.position, self.fill, strict=True)]
        return tuple(anchors if self.spec.horizon is None else (min(n, self.spec.horizon) for n in anchors))

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The leaves below a name: group("weights") → {site: tensor}."""
        start = f"{prefix}."
        return {name[len(start) :]: tensor for name, tensor in self.tensors.items() if name.startswith(start)}

    def window(self, name: str) -> Tensor:
        """Keys or values (B, W−1, H, ...) of the tokens before the anchor that the window still reaches."""
        if f"window.{name}" in self.tensors:
            return self.tensors[f"window.{name}"]
        size, cache = self.spec.window - 1, self.tensors[f"cache.{name}"]
        missing = cache.new_zeros(cache.shape[0], max(size - cache.shape[1], 0), *cache.shape[2:])
        return torch.cat([missing, cache[:, max(cache.shape[1] - size, 0) :]], dim=1)

    def updated(self, tensors: Mapping[str, Tensor], position: Sequence[int] | None = None) -> MemoryState:
        """A state with some leaves replaced or added."""
        new_position = self.position if position is None else tuple(position)
        return MemoryState(self.spec, {**self.tensors, **tensors}, new_position)

    def map(self, function: Callable[[Tensor], Tensor]) -> MemoryState:
        return MemoryState(self.spec, {name: function(t) for name, t in self.tensors.items()}, self.position)

    def select(self, rows: Rows) -> MemoryState:
        """The state of these rows, in this order; rows may repeat (beam search)."""
        indices = checked_rows(rows, self.batch)
        position = tuple(self.position[r] for r in indices)
        chosen = {
            name: tensor.index_select(0, torch.tensor(indices, device=tensor.device))
            for name, tensor in self.tensors.items()
        }
        return MemoryState(self.spec, chosen, position).with_entries_aligned()

    def with_entries_aligned(self, count: int | None = None) -> MemoryState:
        """The same with caches of `count` tokens, by default as many as the longest row needs: cut or padded left."""
        size = max((0, *self.cached)) if count is None else count

        def fitted(cache: Tensor) -> Tensor:
            missing = size - cache.shape[1]
            if missing <= 0:
                return cache[:, -missing:].clone() if missing else cache  # a view would keep all of it
            return torch.cat([cache.new_zeros(cache.shape[0], missing, *cache.shape[2:]), cache], dim=1)

        return self.updated({f"cache.{name}": fitted(cache) for name, cache in self.group("cache").items()})

    @staticmethod
    def cat(states: Sequence[MemoryState]) -> MemoryState:
        """Rows of several states of one spec, one below the other."""
        longest = max((0, *(n for state in states for n in state.cached)))
        states = [state.with_entries_aligned(longest) for state in states]
        first = states[0]
        joined = {name: torch.cat([state.tensors[name] for state in states]) for name in first.tensors}
        return MemoryState(first.spec, joined, tuple(n for state in states for n in state.position))

    def check(
        self,
        spec: MemorySpec,
        batch: int,
        device: torch.device,
        like: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raise unless this state can go on under `spec` with `batch` rows on `device`, with the widths of `like`.

        dtype: what is worked in; a state of more precision is not rounded without being asked to.
        """
        if self.spec != spec:
            raise ValueError(f"state belongs to another memory; fields differ: {self.spec.differences(spec)}.")
        if self.batch != batch:
            raise ValueError(f"state has {self.batch} rows, but the input has {batch}; use state.select(rows).")
        for tensor in self.tensors.values():
            if tensor.device != device:
                raise ValueError(f"state is on {tensor.device}, the input on {device}; use state.to(...).")
            if dtype is not None and (
                not tensor.is_floating_point() or torch.promote_types(tensor.dtype, dtype) != dtype
            ):
                raise ValueError(f"state is {tensor.dtype}, but {dtype} is worked in here; use state.to(...).")
        for name, tensor in (like or {}).items():
            have = self.tensors.get(name)
            needed = tensor.shape[1:]
            if name.startswith("cache."):
                needed = torch.Size((max((0, *self.cached)), *needed[1:]))
            if have is None or have.shape[1:] != needed:
                shape = None if have is None else tuple(have.shape[1:])
                raise ValueError(f"state has {name} of shape {shape} per row; this memory needs {tuple(needed)}.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file: complete, or not at all."""
        metadata = {
            "format": FORMAT,
            "version": str(FORMAT_VERSION),
            "spec": json.dumps(self.spec.to_dict()),
            "position": json.dumps(self.position),
        }
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in self.tensors.items()}
        write_whole(path, serialise(tensors, metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str], spec: MemorySpec | None = None) -> MemoryState:
        """Read what `save` wrote. With `spec`, a file of another memory is an error."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"path={str(path)!r} is not a file.")
        try:
            metadata, tensors = read_tensors(path)
        except SafetensorError as error:
            raise ValueError(f"path={str(path)!r} is truncated or not a safetensors file: {error}.") from error
        _check_metadata(metadata, path)
        try:
            state = cls(MemorySpec.from_dict(json.loads(metadata["spec"])), tensors, _read_position(metadata, tensors))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"path={str(path)!r} has damaged metadata: {error}.") from error
        if spec is not None and state.spec != spec:
            raise ValueError(f"path={str(path)!r} belongs to another memory: {state.spec.differences(spec)}.")
        return state


def checked_rows(rows: Rows, batch: int) -> list[int]:
    """Row numbers as host integers between 0 and the batch."""
    indices = whole_numbers("rows", rows)
    for r in indices:
        if not -batch <= r < batch:
            raise ValueError(f"rows={indices} must lie in a batch of {batch}.")
    return [r % batch for r in indices]


def fresh_state(spec: MemorySpec, initial: Mapping[str, Tensor], batch: int, gate_names: Sequence[str]) -> MemoryState:
    """The state before the first token. `initial`: {site: (H, out, in)}, shared by the rows and differentiable."""
    some = next(iter(initial.values()))
    heads = some.shape[0]
    shapes = spec.site_shapes()

    def zeros(*shape: int) -> Tensor:
        return some.new_zeros(batch, *shape)

    def rows(x: Tensor) -> Tensor:
        """A copy: parameters are changed in place by those who train them, and states must not change with them."""
        return x.expand(batch, *x.shape).clone()

    tensors: dict[str, Tensor] = {}
    for site in shapes:
        weight = initial[site]
        if spec.retracts:
            weight, _ = retract_site(spec, site, weight)
        tensors[f"weights.{site}"] = rows(weight)
    if spec.kernel:
        tensors["pairs"] = rows(initial["pairs"])
    if spec.cached_sites:
        tensors["cache.keys"] = zeros(0, heads, spec.key_width)
        tensors |= {f"cache.{site}": zeros(0, heads, shapes[site][0]) for site in spec.cached_sites}
    if spec.carries_momentum:
        for site in spec.fast:
            tensors[f"momentum.{site}"] = zeros(*initial[site].shape)
    if spec.optimizer == "muon":
        tensors["pending"] = zeros(heads)
    widths: dict[str, tuple[int, ...]] = {"keys": (spec.key_width,), "values": (spec.value_width,)}
    for name, width in widths.items():
        if name != "keys" or not spec.cached_sites:
            tensors[f"window.{name}"] = zeros(spec.window - 1, heads, *width)
    if not spec.exact:
        gate_widths: dict[str, tuple[int, ...]] = {name: () for name in gate_names}
        if "window" in gate_widths:
            gate_widths["window"] = (spec.window,)
        for name, width in {**widths, **gate_widths}.items():
            tensors[f"open.{name}"] = zeros(spec.chunk - 1, heads, *width)
    return MemoryState(spec, tensors, (0,) * batch)


def _read_position(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    position = json.loads(metadata["position"])
    rows = {tensor.shape[0] for tensor in tensors.values()}
    if not all(isinstance(count, int) and count >= 0 for count in position) or rows != {len(position)}:
        raise ValueError(f"position={position!r} must give a count for each of {sorted(rows)} rows")
    return tuple(position)


def _check_metadata(metadata: Mapping[str, str], path: str | os.PathLike[str]) -> None:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"path={str(path)!r} is a safetensors file, but not a saved memory state.")
    if metadata.get("version") != str(FORMAT_VERSION):
        raise ValueError(
            f"path={str(path)!r} has format version {metadata.get('version')!r}; this library reads {FORMAT_VERSION}."
        )
