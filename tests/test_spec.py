"""MemorySpec and its table: what fits together, what does not, and what errors say."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from atlas_memory import MemorySpec, presets
from atlas_memory.spec import CHOICES, PRESETS, SITES


def test_presets_are_a_mapping_from_names_to_specs() -> None:
    assert presets.names() == sorted(PRESETS)
    assert list(presets) == presets.names()
    assert len(presets) == len(PRESETS)
    assert "atlas" in presets
    assert "atals" not in presets
    assert presets["atlas"] == presets.make("atlas")


# The table of docs/method.md, written a second time: feature, network, objective, window, optimizer, what is constant.
TABLE = {
    "linear_attention": ("identity", "matrix", "dot", False, "gd", {"retention", "step"}),
    "gated_linear_attention": ("identity", "matrix", "dot", False, "gd", set()),
    "deltanet": ("identity", "matrix", "regression", False, "gd", {"retention"}),
    "gated_deltanet": ("identity", "matrix", "regression", False, "gd", set()),
    "ttt": ("identity", "mlp", "regression", False, "gd", {"retention"}),
    "titans": ("identity", "mlp", "regression", False, "momentum", set()),
    "dla": ("polynomial", "mlp", "dot", False, "gd", set()),
    "swla": ("polynomial", "matrix", "dot", True, "gd", set()),
    "omeganet": ("polynomial", "mlp", "regression", True, "gd", set()),
    "atlas": ("polynomial", "mlp", "regression", True, "muon", set()),
    "atlas++": ("polynomial", "gated_mlp", "regression", True, "muon", set()),
}


@pytest.mark.parametrize("name", TABLE)
def test_presets_are_the_papers_models(name: str) -> None:
    spec = presets[name]
    constant = {gate for gate in ("retention", "step") if getattr(spec, gate) == "one"}
    row = (spec.feature, spec.network, spec.objective, spec.window > 1, spec.optimizer, constant)
    assert row == TABLE[name]
    assert spec.gradient_at == ("decayed" if name == "gated_deltanet" else "state")


@pytest.mark.parametrize("name", presets.names())
def test_specs_survive_their_dictionary(name: str) -> None:
    spec = presets.make(name, chunk=5)
    assert MemorySpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_fitting_values() -> None:
    """Fields left open depend on the others."""
    matrix, deep = MemorySpec(network="matrix"), MemorySpec(network="gated_mlp", feature="polynomial", chunk=16)
    assert (matrix.fast, matrix.residual, matrix.key_width, matrix.expansion) == (("down",), False, 64, 4)
    assert (deep.fast, deep.residual, deep.key_width, deep.expansion) == (("gate", "up", "down"), True, 32, 2)
    assert deep.interval == 16
    assert MemorySpec(network="matrix", key_width=8).value_width == 8


def test_what_was_fitted_is_fitted_to_changes() -> None:
    assert presets["atlas"].replace(chunk=32) == presets.make("atlas", chunk=32)
    assert presets["titans"].replace(network="gated_mlp").fast == ("gate", "up", "down")
    assert presets["titans"].replace(key_width=16).value_width == 16
    assert presets["titans"].replace(network="matrix") == MemorySpec(network="matrix", optimizer="momentum")
    given = presets.make("atlas", interval=16, expansion=3).replace(chunk=32)
    assert (given.interval, given.expansion) == (16, 3)


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        ({"network": "matrix", "key_width": 4, "value_width": 5}, {"down": (5, 4)}),
        ({"network": "matrix", "key_width": 4, "feature": "polynomial", "degree": 2}, {"down": (4, 15)}),
        ({"network": "mlp", "key_width": 4, "expansion": 3}, {"up": (12, 4), "down": (4, 12)}),
        (
            {"network": "gated_mlp", "key_width": 2, "expansion": 3, "feature": "polynomial", "degree": 3},
            {"gate": (6, 10), "up": (6, 10), "down": (2, 6)},
        ),
    ],
)
def test_site_shapes(fields: dict[str, Any], shapes: dict[str, tuple[int, int]]) -> None:
    spec = MemorySpec(**fields)
    assert spec.site_shapes() == shapes
    assert tuple(shapes) == SITES[spec.network]


@pytest.mark.parametrize(("width", "features"), [(16, 153), (32, 561), (64, 2145)])
def test_feature_width(width: int, features: int) -> None:
    assert MemorySpec(feature="polynomial", key_width=width).feature_width == features


@pytest.mark.parametrize(
    ("fields", "exact"),
    [
        ({"network": "matrix", "objective": "dot"}, True),
        ({"network": "matrix", "objective": "dot", "optimizer": "muon"}, True),
        ({"network": "matrix", "window": 3, "optimizer": "momentum"}, True),
        ({"network": "matrix", "optimizer": "muon"}, False),
        ({"network": "matrix", "write_cap": 1.0}, False),
        ({"network": "matrix", "surprise_retention": 1.0}, False),
        ({"network": "mlp", "objective": "dot"}, False),
    ],
)
def test_which_memories_are_exact(fields: dict[str, Any], exact: bool) -> None:
    spec = MemorySpec(chunk=8, **fields)
    assert spec.exact == exact
    assert spec.anchor_chunk == (1 if exact else 8)


def test_specs_are_values() -> None:
    spec = MemorySpec()
    assert spec == MemorySpec()
    assert hash(spec) == hash(MemorySpec())
    assert spec.replace(chunk=8) != spec
    assert spec.replace(chunk=8, interval=2).interval == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.chunk = 3


def test_differences_are_told_in_words() -> None:
    spec = MemorySpec(chunk=8)
    assert spec.differences(spec) == ""
    assert spec.differences(spec.replace(window=3)) == "window: 1 != 3"


@pytest.mark.parametrize(
    ("name", "near"), [("atals", "atlas"), ("titan", "titans"), ("gated_delta_net", "gated_deltanet")]
)
def test_unknown_preset_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"preset='{name}' is unknown\. Nearest: .*{near}.* Known: .*omeganet"):
        presets.make(name)


def test_unknown_preset_far_from_all() -> None:
    with pytest.raises(ValueError, match=r"preset='zzz' is unknown\. Known: "):
        presets["zzz"]


@pytest.mark.parametrize(("name", "near"), [("windows", "window"), ("optimiser", "optimizer"), ("chunks", "chunk")])
def test_unknown_field_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"no field '{name}'\. Nearest: .*{near}"):
        presets.make("atlas", **{name: 1})


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}='banana' is not a choice; allowed: {CHOICES[name][0]}"):
        MemorySpec(**{name: "banana"})


COUNTS = ("degree", "window", "newton_schulz_steps", "chunk", "interval", "expansion", "key_width", "value_width")


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_whole_and_positive(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a whole number of at least 1"):
        MemorySpec(**{name: value})


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "1"])
@pytest.mark.parametrize("name", ["surprise_retention", "write_cap", "retraction"])
def test_bounds_are_positive_and_finite(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a positive finite number, or None"):
        MemorySpec(**{name: value})


@pytest.mark.parametrize("value", [None, 1, "yes"])
@pytest.mark.parametrize("name", ["tie_retention", "limiter"])
def test_switches_are_booleans(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} must be True or False"):
        MemorySpec(**{name: value})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"network": "matrix", "fast": ("up",)}, "fast="),
        ({"network": "mlp", "fast": ()}, "fast="),
        ({"network": "mlp", "fast": ("up", "up")}, "fast="),
        ({"network": "mlp", "fast": ("gate",)}, "fast="),
        ({"network": "mlp", "value_width": 3, "key_width": 4}, "value_width=3"),
        ({"network": "matrix", "residual": True}, "residual=True"),
        ({"surprise_retention": 1.0, "gradient_at": "decayed"}, "surprise_retention"),
        ({"surprise_retention": 1.0, "retention": "one"}, "surprise_retention"),
        ({"tie_retention": True, "retention": "one"}, "tie_retention"),
        ({"tie_retention": True, "step": "one"}, "tie_retention"),
    ],
)
def test_combinations_that_make_no_sense(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MemorySpec(**fields)


@pytest.mark.parametrize("value", ["up", 3])
def test_fast_must_be_names(value: object) -> None:
    """A bare name would be read letter by letter."""
    with pytest.raises(ValueError, match="fast="):
        MemorySpec(network="mlp", fast=value)


def test_fast_may_be_the_list_that_json_makes_of_it() -> None:
    assert MemorySpec.from_dict({"network": "mlp", "fast": ["up"]}).fast == ("up",)


@pytest.mark.parametrize("value", ["yes", 1, 0.0])
def test_residual_is_a_boolean(value: object) -> None:
    with pytest.raises(ValueError, match="residual="):
        MemorySpec(network="mlp", residual=value)
