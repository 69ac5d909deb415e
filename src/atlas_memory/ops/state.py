"""MemoryState: everything a memory needs to go on reading, and nothing that grows.

One flat tree of tensors, every leaf batch-first, and the number of tokens each row has read:

    weights.<site>    (B, H, out, in)       fast weights at the anchor
    momentum.<site>   (B, H, out, in)       optimizers that carry one
    pending           (B, H)                Muon: the steps gathered since its last update point
    window.keys …     (B, W−1, H, D)        the tokens before the anchor that the window still reaches
    open.keys …       (B, C−1, H, D)        tokens and gates since the anchor; right-aligned, zeros before
    conv.<name>       (B, K−1, channels)    the layer's convolution tails

States are never changed in place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from atlas_memory.ops.dense import retract
from atlas_memory.spec import MemorySpec

FORMAT = "atlas-memory-state"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class MemoryState:
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

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The leaves below a name: group("weights") → {site: tensor}."""
        start = f"{prefix}."
        return {name[len(start) :]: tensor for name, tensor in self.tensors.items() if name.startswith(start)}

    def updated(self, tensors: Mapping[str, Tensor], position: Sequence[int] | None = None) -> MemoryState:
        """A state with some leaves replaced or added."""
        new_position = self.position if position is None else tuple(position)
        return MemoryState(self.spec, {**self.tensors, **tensors}, new_position)

    def map(self, function: Callable[[Tensor], Tensor]) -> MemoryState:
        return MemoryState(self.spec, {name: function(t) for name, t in self.tensors.items()}, self.position)

    def detach(self) -> MemoryState:
        return self.map(Tensor.detach)

    def clone(self) -> MemoryState:
        return self.map(Tensor.clone)

    def to(self, *args: Any, **kwargs: Any) -> MemoryState:
        """Device or dtype, as Tensor.to."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def select(self, rows: Tensor | Sequence[int]) -> MemoryState:
        """The state of these rows, in this order; rows may repeat (beam search)."""
        indices = [int(r) for r in (rows.tolist() if isinstance(rows, Tensor) else rows)]
        for r in indices:
            if not -self.batch <= r < self.batch:
                raise ValueError(f"rows={indices} must lie in a batch of {self.batch}.")
        position = tuple(self.position[r] for r in indices)
        chosen = {
            name: tensor.index_select(0, torch.tensor(indices, device=tensor.device) % self.batch)
            for name, tensor in self.tensors.items()
        }
        return MemoryState(self.spec, chosen, position)

    @staticmethod
    def cat(states: Sequence[MemoryState]) -> MemoryState:
        """Rows of several states of one spec, one below the other."""
        first = states[0]
        joined = {name: torch.cat([state.tensors[name] for state in states]) for name in first.tensors}
        return MemoryState(first.spec, joined, tuple(n for state in states for n in state.position))

    def check(
        self, spec: MemorySpec, batch: int, device: torch.device, like: Mapping[str, Tensor] | None = None
    ) -> None:
        """Raise unless this state can go on under `spec` with `batch` rows on `device`, with the widths of `like`."""
        if self.spec != spec:
            raise ValueError(f"state belongs to another memory; fields differ: {self.spec.differences(spec)}.")
        if self.batch != batch:
            raise ValueError(f"state has {self.batch} rows, but the input has {batch}; use state.select(rows).")
        for tensor in self.tensors.values():
            if tensor.device != device:
                raise ValueError(f"state is on {tensor.device}, the input on {device}; use state.to(...).")
        for name, tensor in (like or {}).items():
            have = self.tensors.get(name)
            if have is None or have.shape[1:] != tensor.shape[1:]:
                shape = None if have is None else tuple(have.shape[1:])
                raise ValueError(
                    f"state has {name} of shape {shape} per row; this memory needs {tuple(tensor.shape[1:])}."
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file: complete, or not at all."""
        metadata = {
            "format": FORMAT,
            "version": str(FORMAT_VERSION),
            "spec": json.dumps(self.spec.to_dict()),
            "position": json.dumps(self.position),
        }
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in self.tensors.items()}
        _write_atomically(Path(path), serialise(tensors, metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str], spec: MemorySpec | None = None) -> MemoryState:
        """Read what `save` wrote. With `spec`, a file of another memory is an error."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"path={str(path)!r} is not a file.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                _check_metadata(metadata, path)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"path={str(path)!r} is truncated or not a safetensors file: {error}.") from error
        try:
            state = cls(MemorySpec.from_dict(json.loads(metadata["spec"])), tensors, _read_position(metadata, tensors))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"path={str(path)!r} has damaged metadata: {error}.") from error
        if spec is not None and state.spec != spec:
            raise ValueError(f"path={str(path)!r} belongs to another memory: {state.spec.differences(spec)}.")
        return state


def fresh_state(spec: MemorySpec, initial: Mapping[str, Tensor], batch: int, gate_names: Sequence[str]) -> MemoryState:
    """The state before the first token. `initial`: {site: (H, out, in)}, shared by the rows and differentiable."""
    some = next(iter(initial.values()))
    heads = some.shape[0]

    def zeros(*shape: int) -> Tensor:
        return some.new_zeros(batch, *shape)

    tensors: dict[str, Tensor] = {}
    for site, weight in initial.items():
        if spec.retracts and spec.retraction is not None:
            weight, _ = retract(weight, spec.retraction)
        tensors[f"weights.{site}"] = weight.expand(batch, *weight.shape)
    if spec.carries_momentum:
        for site in spec.fast:
            tensors[f"momentum.{site}"] = zeros(*initial[site].shape)
    if spec.optimizer == "muon":
        tensors["pending"] = zeros(heads)
    widths: dict[str, tuple[int, ...]] = {"keys": (spec.key_width,), "values": (spec.value_width,)}
    for name, width in widths.items():
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


def _write_atomically(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
