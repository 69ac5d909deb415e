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

from atlas_memory.checks import check_choice, check_flag, check_whole

CHOICES: dict[str, tuple[str, ...]] = {
    "feature": ("identity", "polynomial", "exponential"),
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
    initial_pairs: int = _FITTING  # exponential: learned (key, vector) pairs a deep memory starts with: 16
    horizon: int | None = None  # exponential: tokens after which a contribution expires; None: never
    normalised: bool = False  # exponential: reads are weighted means, as in softmax attention
    network: str = "mlp"
    activation: str = "centred_gelu"
    fast: tuple[str, ...] = _FITTING  # which layers learn while reading: all of them
    residual: bool = _FITTING  # z + …: yes for deep networks, no for a matrix
    expansion: int = _FITTING  # hidden width / key width: 4, and 2 under a wide feature map
    key_width: int = _FITTING  # per head: 64, and 32 under a polynomial
    value_width: int = _FITTING  # per head: the key width
    objective: str = "regression"
    window: int = 1
    optimizer: str = "gd"
    interval: int = _FITTING  # tokens between Muon's update points: the chunk
    newton_schulz_steps: int = 5
    momentum_floor: float = 1000.0  # Muon: added to the norm that Newton–Schulz divides by
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
        for name, value in self._fitting().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _check_combinations(self)

    def _fitting(self) -> dict[str, Any]:
        """What fits the other fields."""
        deep, wide = self.network != "matrix", self.feature != "identity"
        own_key_width = 32 if self.feature == "polynomial" else 64
        return {
            "initial_pairs": 16 if deep and self.kernel else 0,
            "fast": SITES[self.network],
            "residual": deep,
            "expansion": 2 if wide else 4,
            "key_width": own_key_width,
            "value_width": self.key_width or own_key_width,
            "interval": self.chunk,
        }

    @property
    def kernel(self) -> bool:
        """Whether the first layer lives in the infinite feature space: kept as (key, vector) entries, one a token."""
        return self.feature == "exponential"

    @property
    def cached_sites(self) -> tuple[str, ...]:
        """The layers that keep an entry for every token."""
        return tuple(site for site in self.feature_sites if site in self.fast) if self.kernel else ()

    @property
    def exact(self) -> bool:
        """Whether every gradient is taken at the previous token's state.

        `chunk` is then a matter of speed, but for what the guards take from it: the largest momentum, and where
        momentum's resonance is retracted.
        """
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
        """Inputs of the first layer; of an infinite one, the pairs it starts with."""
        if self.kernel:
            return self.initial_pairs
        return math.comb(self.key_width + self.degree, self.degree) if self.feature == "polynomial" else self.key_width

    def site_shapes(self) -> dict[str, tuple[int, int]]:
        """(output width, input width) of every layer of the memory network."""
        if self.network == "matrix":
            return {"down": (self.value_width, self.feature_width)}
        first, last = (self.hidden_width, self.feature_width), (self.value_width, self.hidden_width)
        return {site: last if site == "down" else first for site in SITES[self.network]}

    def initial_shapes(self) -> dict[str, tuple[int, int]]:
        """What a memory starts from: the weights, and the keys of the initial pairs of an infinite layer."""
        pairs = {"pairs": (self.initial_pairs, self.key_width)} if self.kernel else {}
        return {**self.site_shapes(), **pairs}

    def replace(self, **changes: Any) -> MemorySpec:
        """Another spec. What fitted the fields before is fitted to the changed ones, as if it had never been given."""
        kept = self.to_dict()
        kept |= {name: None for name, value in self._fitting().items() if kept[name] == value}
        return MemorySpec.from_dict({**kept, **changes})

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
_DEEP_ATTENTION = {"feature": "exponential", "network": "mlp", "retention": "one"}

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
    "transformer": {
        **_DEEP_ATTENTION,
        "network": "matrix",
        "objective": "dot",
        "step": "one",
        "normalised": True,
    },
    "deep_transformer": {**_DEEP_ATTENTION, "objective": "dot"},
    "swdt": {**_DEEP_ATTENTION, "objective": "dot", "horizon": 512},
    "dot": {**_DEEP_ATTENTION, "window": 8},
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
        check_choice(name, getattr(spec, name), allowed)


def _check_numbers(spec: MemorySpec) -> None:
    for name in ("degree", "window", "newton_schulz_steps", "chunk"):
        check_whole(name, getattr(spec, name))
    for name in ("horizon", "interval", "expansion", "key_width", "value_width"):
        check_whole(name, getattr(spec, name), optional=True)
    check_whole("initial_pairs", spec.initial_pairs, least=0, optional=True)
    for name in ("surprise_retention", "write_cap", "retraction", "momentum_floor"):
        value = getattr(spec, name)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        optional = name != "momentum_floor"
        if not (real and 0 < value < math.inf) and not (optional and value is None):
            hint = ", or None to switch it off" if optional else ""
            raise ValueError(f"{name}={value!r} must be a positive finite number{hint}.")
    for name in ("tie_retention", "limiter", "normalised"):
        check_flag(name, getattr(spec, name))
    if spec.residual is not None:
        check_flag("residual", spec.residual)


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
    _check_kernel(spec)
    if spec.tie_retention and (spec.retention == "one" or spec.step == "one"):
        raise ValueError("tie_retention=True needs retention='learned' and step='learned'.")


def _check_kernel(spec: MemorySpec) -> None:
    """What only an infinite first layer can do, and what it cannot."""
    if not spec.kernel:
        for name, off in (("horizon", None), ("normalised", False), ("initial_pairs", 0)):
            if getattr(spec, name) != off:
                raise ValueError(f"{name}={getattr(spec, name)!r} needs feature='exponential'; here it must be {off}.")
        return
    if spec.optimizer != "gd":
        raise ValueError(f"optimizer={spec.optimizer!r} does not work with feature='exponential'; allowed: gd.")
    if spec.horizon is not None and spec.horizon < spec.window:
        raise ValueError(f"horizon={spec.horizon} must be at least window={spec.window}: the window is never expired.")
    if spec.network == "matrix" and spec.initial_pairs:
        raise ValueError(f"initial_pairs={spec.initial_pairs} needs a deep network; a matrix memory starts empty.")
    plain = (spec.network, spec.objective, spec.window, spec.retention, spec.step) == ("matrix", "dot", 1, "one", "one")
    if spec.normalised and not (plain and spec.exact):
        raise ValueError(
            "normalised=True needs network='matrix', objective='dot', window=1, retention='one', step='one' and no "
            "surprise_retention or write_cap: a softmax has no gates."
        )
