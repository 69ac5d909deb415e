"""The one signature of the operator, checked before anything is computed.

Shapes: B rows, T tokens, H heads, D key width, V value width, W window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_memory.ops.features import Feature, feature_map
from atlas_memory.ops.optimizers import Gates
from atlas_memory.ops.packing import all_alike, last_rows, whole_numbers
from atlas_memory.ops.stability import all_finite
from atlas_memory.ops.state import MemoryState, fresh_state
from atlas_memory.spec import MemorySpec


class Call(NamedTuple):
    """The arguments of one call, in the working precision: float32, or float64 if the keys are."""

    spec: MemorySpec
    feature: Feature
    queries: Tensor  # (B, T, H, D)
    keys: Tensor  # (B, T, H, D)
    values: Tensor  # (B, T, H, V)
    gates: Gates  # (B, T, H), window (B, T, H, W)
    state: MemoryState
    lengths: tuple[int, ...]  # real tokens per row


def prepare(
    spec: MemorySpec,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    gates: Gates,
    initial: Mapping[str, Tensor] | None,
    state: MemoryState | None,
    coefficients: Tensor | None,
    lengths: Tensor | Sequence[int] | None,
    check_finite: bool | None,
) -> Call:
    """Check every argument, promote to the working precision, and make the fresh state where none is given."""
    _check_kinds(spec, gates, state)
    _check_tokens(spec, queries, keys, values)
    _check_gates(spec, gates, keys)
    dtype = torch.float64 if keys.dtype == torch.float64 else torch.float32
    batch, tokens, heads = keys.shape[:3]
    lengths = _checked_lengths(lengths, batch, tokens)
    _check_coefficients(spec, coefficients, keys.device)
    gates = Gates(*(None if gate is None else gate.to(dtype) for gate in gates))
    if spec.limiter and gates.momentum is not None:
        gates = gates._replace(momentum=gates.momentum.clamp_max(spec.largest_momentum))
    weights = _initial_weights(spec, initial, state, keys, heads, dtype)
    names = [name for name in Gates._fields if getattr(gates, name) is not None]
    fresh = fresh_state(spec, weights, batch, names)
    if state is None:
        state = fresh
    else:
        state.check(spec, batch, keys.device, fresh.tensors, dtype)
        working = {name: state.tensors[name].to(dtype) for name in fresh.tensors}
        state = MemoryState(spec, working | _without_padding(state, working), state.position)
    if check_finite if check_finite is not None else _eager_cpu(keys):
        tensors = {"queries": queries, "keys": keys, "values": values, **_named_gates(gates)}
        tensors |= {f"initial[{name!r}]": weight for name, weight in (initial or {}).items()}
        _check_finite(tensors if coefficients is None else {**tensors, "coefficients": coefficients})
        _check_range(gates)
        if spec.kernel and coefficients is not None and float(coefficients.detach().amin()) < 0:
            raise ValueError(f"coefficients={coefficients.tolist()}: the sharpness must not be negative.")
    keys = keys.to(dtype)
    feature = feature_map(spec, coefficients, keys)
    return Call(spec, feature, queries.to(dtype), keys, values.to(dtype), gates, state, lengths)


def check_recall(spec: MemorySpec, queries: Tensor, state: MemoryState, check_finite: bool | None) -> None:
    """As `prepare` checks them, where queries come alone."""
    _check_kinds(spec, Gates(), state, needed=True)
    _check_width("queries", queries, spec.key_width)
    if check_finite if check_finite is not None else _eager_cpu(queries):
        _check_finite({"queries": queries})


def without_autocast(x: Any) -> AbstractContextManager[object]:
    """Keeps the working precision of x; devices without autocast, such as meta, have nothing to switch off."""
    if not isinstance(x, Tensor):
        return nullcontext()  # what x is instead will be said by the checks
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _eager_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_kinds(spec: MemorySpec, gates: Gates, state: MemoryState | None, *, needed: bool = False) -> None:
    """needed: of the state, which a call that writes may do without."""
    kinds: dict[str, tuple[Any, type]] = {"spec": (spec, MemorySpec), "gates": (gates, Gates)}
    if state is not None or needed:
        kinds["state"] = state, MemoryState
    for name, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}.")


def _checked_lengths(lengths: Tensor | Sequence[int] | None, batch: int, tokens: int) -> tuple[int, ...]:
    checked = (tokens,) * batch if lengths is None else tuple(whole_numbers("lengths", lengths))
    if len(checked) != batch or any(not 0 <= n <= tokens for n in checked):
        raise ValueError(f"lengths={checked} must hold {batch} numbers between 0 and {tokens}.")
    return checked


def _check_tokens(spec: MemorySpec, queries: Tensor, keys: Tensor, values: Tensor) -> None:
    for name, tensor, width in (
        ("keys", keys, spec.key_width),
        ("queries", queries, spec.key_width),
        ("values", values, spec.value_width),
    ):
        _check_width(name, tensor, width)
        if tensor.shape[:3] != keys.shape[:3]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but keys have {tuple(keys.shape)}.")
        if tensor.device != keys.device:
            raise ValueError(f"{name} are on {tensor.device}, but keys on {keys.device}.")


def _check_width(name: str, tensor: Tensor, width: int) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if tensor.ndim != 4 or tensor.shape[-1] != width:
        raise ValueError(f"{name} must have shape (batch, tokens, heads, {width}), got {tuple(tensor.shape)}.")
    if tensor.shape[0] == 0:
        raise ValueError(f"{name} must have at least one row, got shape {tuple(tensor.shape)}.")
    _check_floating(name, tensor)


def _check_floating(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {tensor.dtype}.")


def _check_gates(spec: MemorySpec, gates: Gates, keys: Tensor) -> None:
    if (gates.momentum is not None) != spec.carries_momentum:
        needed = "needs" if spec.carries_momentum else "takes no"
        raise ValueError(f"optimizer={spec.optimizer!r} {needed} gates.momentum.")
    constant = {"retention": spec.retention == "one", "step": spec.step == "one", "window": spec.window == 1}
    for name, gate in gates._asdict().items():
        if gate is None:
            continue
        _check_floating(f"gates.{name}", gate)
        if constant.get(name):
            raise ValueError(
                f"gates.{name} is given, but {name}={getattr(spec, name)!r} holds it at one; leave it out."
            )
        shape = (*keys.shape[:3], spec.window) if name == "window" else tuple(keys.shape[:3])
        if tuple(gate.shape) != shape:
            raise ValueError(f"gates.{name} must have shape {shape}, got {tuple(gate.shape)}.")
        if gate.device != keys.device:
            raise ValueError(f"gates.{name} is on {gate.device}, but keys on {keys.device}.")


def _check_coefficients(spec: MemorySpec, coefficients: Tensor | None, device: torch.device) -> None:
    if coefficients is None:
        return
    _check_floating("coefficients", coefficients)
    counts = {"polynomial": spec.degree + 1, "exponential": 1}
    if spec.feature not in counts:
        raise ValueError(f"coefficients are for feature='polynomial' and 'exponential', not {spec.feature!r}.")
    if tuple(coefficients.shape) != (counts[spec.feature],):
        raise ValueError(f"coefficients must have shape ({counts[spec.feature]},), got {tuple(coefficients.shape)}.")
    if coefficients.device != device:
        raise ValueError(f"coefficients are on {coefficients.device}, but keys on {device}.")


def _initial_weights(
    spec: MemorySpec,
    initial: Mapping[str, Tensor] | None,
    state: MemoryState | None,
    keys: Tensor,
    heads: int,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The initial weights a fresh state starts from; zeros of the right shapes where a state replaces them."""
    shapes = {name: (heads, *shape) for name, shape in spec.initial_shapes().items()}
    if initial is None:
        if state is None and spec.network != "matrix":
            raise ValueError(f"initial must give the weights {shapes} of a deep memory, or state must.")
        return {site: keys.new_zeros(shape, dtype=dtype) for site, shape in shapes.items()}
    for site, shape in shapes.items():
        if site in initial:
            _check_floating(f"initial[{site!r}]", initial[site])
        given = tuple(initial[site].shape) if site in initial else None
        if given != shape:
            raise ValueError(f"initial[{site!r}] must have shape {shape}, got {given}.")
        if initial[site].device != keys.device:
            raise ValueError(f"initial[{site!r}] is on {initial[site].device}, but keys on {keys.device}.")
    return {site: initial[site].to(dtype) for site in shapes}


def _without_padding(state: MemoryState, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Caches whose padding is zero and gets no gradient, whatever a caller has put there."""
    alike = all_alike(state.cached)
    caches = {name: x for name, x in tensors.items() if name.startswith("cache.") and not alike}
    return {name: last_rows(x, [x.shape[1]] * x.shape[0], x.shape[1], state.cached) for name, x in caches.items()}


def _named_gates(gates: Gates) -> dict[str, Tensor]:
    return {f"gates.{name}": gate for name, gate in gates._asdict().items() if gate is not None}


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise ValueError(f"{name} holds NaN or infinite numbers; only finite ones are accepted.")


def _check_range(gates: Gates) -> None:
    for name, gate in _named_gates(gates).items():
        if gate.numel() and not (float(gate.detach().amin()) >= 0 and float(gate.detach().amax()) <= 1):
            raise ValueError(f"{name} must lie between 0 and 1.")
