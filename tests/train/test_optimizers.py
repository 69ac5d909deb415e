"""Every parameter of every preset is in one group, and in the right one."""

from __future__ import annotations

import pytest
import torch

from atlas_memory.train.optimizers import KINDS, make_optimizers, parameter_kinds
from atlas_memory.train.recipe import OptimizerConfig
from tests.models.support import PAIRS, layers_of, small_model

# A word of the name of a parameter, and the kind it must have: looked up by name here, by module in the library.
NAMES = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    ".gates.": "gate",
    ".initial.": "initial",
    "mixing": "convolution",
    "coefficients": "coefficient",
    "persistent": "persistent",
    "norm": "norm",
    "between": "norm",
    "union": "norm",
}


def expected_kind(name: str) -> str:
    return next((kind for word, kind in NAMES.items() if word in name), "matrix")


@pytest.mark.parametrize(("preset", "backbone"), PAIRS)
def test_kinds(preset: str, backbone: str) -> None:
    persistent = {} if backbone == "lmm" else {"persistent_tokens": 2}
    model = small_model(backbone=backbone, **layers_of(preset, "one"), **persistent)
    kinds = parameter_kinds(model)
    assert list(kinds) == [name for name, _ in model.named_parameters()]
    assert kinds == {name: expected_kind(name) for name in kinds}
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    assert all(shapes[name] == 2 for name, kind in kinds.items() if KINDS[kind].muon)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_parameter_is_in_one_group(name: str) -> None:
    model = small_model(backbone="mal", preset="atlas", tie_word_embeddings=True)
    kinds = parameter_kinds(model)
    names = {parameter: key for key, parameter in model.named_parameters()}
    optimizers = make_optimizers(model, OptimizerConfig.model_validate({"name": name, "weight_decay": 0.3}))
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    placed = [names[parameter] for _, group in groups for parameter in group["params"]]
    assert sorted(placed) == sorted(kinds)
    for optimizer, group in groups:
        for parameter in group["params"]:
            kind = KINDS[kinds[names[parameter]]]
            assert group["weight_decay"] == (0.3 if kind.decays else 0.0)
            assert isinstance(optimizer, torch.optim.Muon) == (kind.muon and name == "muon")


def test_frozen_parameters_are_left_out() -> None:
    model = small_model(backbone="lmm")
    model.model.embed_tokens.weight.requires_grad_(False)
    assert "model.embed_tokens.weight" not in parameter_kinds(model)


def test_a_parameter_without_a_kind_is_an_error() -> None:
    model = small_model(backbone="lmm")
    model.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="extra"):
        parameter_kinds(model)
