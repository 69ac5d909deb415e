"""MemorySpec: the choices that make a model of the family. PRESETS: the family, as data.

A memory is a point in the space of these fields and nothing else. A new member of the family is one more row of
`PRESETS`; no code anywhere asks for a preset by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

CHOICES: dict[str, tuple[str, ...]] = {
    "feature": ("identity", "polynomial"),
    "network": ("matrix", "mlp", "gated_mlp"),
    "activation": ("gelu", "centred_gelu", "identity"),
    "objective": ("regression", "dot"),
    "optimizer": ("gd", "momentum", "muon"),
    "gradient_at": ("state", "decayed"),
    "retention": ("learned", "one"),
    "step": ("learned", "one"),
    "gates": ("smooth", "hard"),
}

# The fast layers of each network, in the order the data takes (eq. 42, 43).
SITES: dict[str, tuple[str, ...]] = {
    "matrix": ("down",),
    "mlp": ("up", "down"),
    "gated_mlp": ("gate", "up", "down"),
}


# Fields that default to None are filled when a spec is made, with what fits its other fields: see `__post_init__`.
_FITTING: Any = None


@dataclasses.dataclass(frozen=True)
class MemorySpec:
    """One memory of the family; every field is one axis of docs/method.md."""

    feature: str = "identity"
    degree: int = 2  # of the polynomial
    network: str = "mlp"
    activation: str = "centred_gelu"
    fast: tuple[str, ...] = _FITTING  # which layers learn while reading: all of them
    residual: bool = _FITTING  # z + …: yes for deep networks, no for a matrix
    expansion: int = _FITTING  # hidden width / key width: 4, and 2 under a polynomial
    key_width: int = _FITTING  # per head: 64, and 32 under a polynomial
    value_width: int = _FITTING  # per head: the key width
    objective: str = "regression"
    window: int = 1
    optimizer: str = "gd"
    interval: int = _FITTING  # tokens between Muon's update points: the chunk
    newton_schulz_steps: int = 5
    gradient_at: str = "state"
    chunk: int = 64
    retention: str = "learned"
    step: str = "learned"
    gates: str = "smooth"
    tie_retention: bool = False  # forget only where something is written
    surprise_retention: float | None = None  # the surprise at which retention is the gate's own value
    write_cap: float | None = None  # the longest gradient one token may write
    limiter: bool = True
    retraction: float | None = 100.0  # largest root-mean-square entry of a fast weight; None: unbounded

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_numbers(self)
        deep, wide = self.network != "matrix", self.feature == "polynomial"
        key_width = self.key_width or (32 if wide else 64)
        fitting = {
            "fast": SITES[self.network],
            "residual": deep,
            "expansion": 2 if wide else 4,
            "key_width": key_width,
            "value_width": key_width,
            "interval": self.chunk,
        }
        for name, value in fitting.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _check_combinations(self)

    @property
    def exact(self) -> bool:
        """Whether every gradient is taken at the previous token's state, so that `chunk` is a speed knob only."""
        state_free = self.surprise_retention is None and self.write_cap is None
        solvable = self.objective == "dot" or self.optimizer != "muon"
        return self.network == "matrix" and solvable and state_free

    @property
    def anchor_chunk(self) -> int:
        """Tokens that share one anchor: the chunk, or one where the recurrence is solved exactly."""
        return 1 if self.exact else self.chunk

    @property
    def retracts(self) -> bool:
        """Whether chunk ends are retracted. Exact memories grow linearly at most, but for heavy-ball momentum."""
        resonant = self.objective == "regression" and self.optimizer == "momentum"
        return self.retraction is not None and (not self.exact or resonant)

    @property
    def limits_writes(self) -> bool:
        """Whether the write limiter can act: the dot objective has no curvature."""
        return self.limiter and self.objective == "regression"

    @property
    def carries_momentum(self) -> bool:
        return self.optimizer != "gd"

    @property
    def largest_momentum(self) -> float:
        """A momentum that outlives its chunk cannot be steered by gradients taken once per chunk."""
        return 1 - 1 / (self.chunk + 1)

    @property
    def feature_sites(self) -> tuple[str, ...]:
        """The layers that see φ of keys and queries; the others see hidden activations."""
        return SITES[self.network][:-1] or SITES[self.network]

    @property
    def hidden_width(self) -> int:
        return self.expansion * self.key_width

    @property
    def feature_width(self) -> int:
        return math.comb(self.key_width + self.degree, self.degree) if self.feature == "polynomial" else self.key_width

    def site_shapes(self) -> dict[str, tuple[int, int]]:
        """(output width, input width) of every layer of the memory network."""
        if self.network == "matrix":
            return {"down": (self.value_width, self.feature_width)}
        first, last = (self.hidden_width, self.feature_width), (self.value_width, self.hidden_width)
        return {site: last if site == "down" else first for site in SITES[self.network]}

    def replace(self, **changes: Any) -> MemorySpec:
        return MemorySpec.from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> MemorySpec:
        _check_field_names(fields)
        fast = fields.get("fast")
        return cls(**{**fields, "fast": tuple(fast) if isinstance(fast, list) else fast})  # JSON has lists

    def differences(self, other: MemorySpec) -> str:
        """The fields in which two specs differ, in words."""
        mine, theirs = self.to_dict(), other.to_dict()
        return ", ".join(f"{name}: {mine[name]!r} != {theirs[name]!r}" for name in mine if mine[name] != theirs[name])


_POLYNOMIAL_MLP = {"feature": "polynomial", "network": "mlp"}

PRESETS: dict[str, dict[str, Any]] = {
    "linear_attention": {"network": "matrix", "objective": "dot", "retention": "one", "step": "one"},
    "gated_linear_attention": {"network": "matrix", "objective": "dot"},
    "deltanet": {"network": "matrix", "retention": "one"},
    "gated_deltanet": {"network": "matrix", "gradient_at": "decayed"},
    "ttt": {"network": "mlp", "retention": "one"},
    "titans": {"network": "mlp", "optimizer": "momentum"},
    "dla": {**_POLYNOMIAL_MLP, "objective": "dot"},
    "swla": {"feature": "polynomial", "network": "matrix", "objective": "dot", "window": 8},
    "omeganet": {**_POLYNOMIAL_MLP, "window": 8},
    "atlas": {**_POLYNOMIAL_MLP, "window": 8, "optimizer": "muon"},
    "atlas++": {"feature": "polynomial", "network": "gated_mlp", "window": 8, "optimizer": "muon"},
}


class Presets(Mapping[str, MemorySpec]):
    """The family by name: `presets.names()`, `presets["atlas"]`, `presets.make("atlas", chunk=32)`."""

    def names(self) -> list[str]:
        return sorted(PRESETS)

    def make(self, name: str, **overrides: Any) -> MemorySpec:
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=3, cutoff=0.4)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            raise ValueError(f"preset={name!r} is unknown.{hint} Known: {', '.join(self.names())}.")
        return MemorySpec.from_dict({**PRESETS[name], **overrides})

    def __getitem__(self, name: str) -> MemorySpec:
        return self.make(name)

    def __contains__(self, name: object) -> bool:
        return name in PRESETS

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(PRESETS)


presets = Presets()


def _check_field_names(fields: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(MemorySpec)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            raise ValueError(f"MemorySpec has no field {name!r}.{hint} Fields: {', '.join(known)}.")


def _check_choices(spec: MemorySpec) -> None:
    for name, allowed in CHOICES.items():
        value = getattr(spec, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not a choice; allowed: {', '.join(allowed)}.")


def _check_numbers(spec: MemorySpec) -> None:
    counts = ("degree", "window", "newton_schulz_steps", "chunk", "interval", "expansion", "key_width", "value_width")
    for name in counts:
        value = getattr(spec, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
    for name in ("surprise_retention", "write_cap", "retraction"):
        value = getattr(spec, name)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (real and 0 < value < math.inf):
            raise ValueError(f"{name}={value!r} must be a positive finite number, or None to switch it off.")
    for name in ("tie_retention", "limiter", "residual"):
        value = getattr(spec, name)
        if not isinstance(value, bool) and not (name == "residual" and value is None):
            raise ValueError(f"{name}={value!r} must be True or False.")


def _check_combinations(spec: MemorySpec) -> None:
    sites = SITES[spec.network]
    named = isinstance(spec.fast, tuple) and spec.fast and set(spec.fast) <= set(sites)
    if not named or len(set(spec.fast)) != len(spec.fast):
        raise ValueError(f"fast={spec.fast!r} must name one or more layers of network={spec.network!r}: {sites}.")
    if spec.residual and spec.value_width != spec.key_width:
        raise ValueError(
            f"value_width={spec.value_width} with residual=True must equal key_width={spec.key_width}: "
            "the residual adds the raw key to the value. Set residual=False or equal widths."
        )
    if spec.residual and spec.network == "matrix":
        raise ValueError("residual=True needs network='mlp' or 'gated_mlp'; a matrix memory is W z alone.")
    if spec.surprise_retention is not None and spec.gradient_at == "decayed":
        raise ValueError(
            "surprise_retention needs gradient_at='state': the surprise sets the decay, "
            "so it cannot be measured after it."
        )
    if spec.surprise_retention is not None and spec.retention == "one":
        raise ValueError("surprise_retention needs retention='learned': there is no retention to weigh.")
    if spec.tie_retention and (spec.retention == "one" or spec.step == "one"):
        raise ValueError("tie_retention=True needs retention='learned' and step='learned'.")
