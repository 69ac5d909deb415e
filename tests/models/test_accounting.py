"""What `atlas-memory info` counts, against models that exist."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from atlas_memory import presets
from atlas_memory.models.accounting import SIZES, account, count_parameters, fitted_config, sized_config
from atlas_memory.models.configuration_atlas import BACKBONES
from tests.models.support import layers_of, small_config, small_model, token_ids


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("layers", ["one", "mixed"])
def test_numbers_of_a_small_model(backbone: str, layers: str) -> None:
    fields = {"backbone": backbone, **layers_of("titans", layers)}
    costs = account(small_config(**fields), context=32)
    model = small_model(torch.bfloat16, **fields)
    initial = sum(p.numel() for name, p in model.named_parameters() if ".initial." in name)
    assert costs.initial_parameters == initial > 0
    assert costs.slow_parameters + initial == sum(p.numel() for p in model.parameters())
    sizes = [model.read(token_ids(1, count), progress=False).nbytes for count in (32, 64)]
    assert costs.state_bytes == sizes[0]
    assert costs.growth_bytes == (sizes[1] - sizes[0]) / 32
    assert (costs.growth_bytes > 0) == (layers == "mixed")
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    assert costs.forward_flops > 2 * matrices
    assert 2 * costs.forward_flops < costs.training_flops < 5 * costs.forward_flops


def test_a_transformer_costs_what_it_should() -> None:
    """Two FLOPs per weight and token, and two products over half of the context."""
    config = small_config(layer_types=["full_attention"], num_hidden_layers=1, hidden_size=64, intermediate_size=128)
    costs = account(config, context=64)
    weights = 4 * 64 * 64 + 3 * 64 * 128 + 64 * config.vocab_size
    attention = 2 * 2 * 64 * 64
    assert 2 * weights + attention // 2 <= costs.forward_flops <= 2 * weights + attention
    assert costs.state_bytes == 64 * 2 * 64 * 2
    assert costs.growth_bytes == costs.transformer_bytes == 2 * 64 * 2
    assert costs.crossover is None


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_what_they_are_called(size: str) -> None:
    config = sized_config(size)
    slow, initial = count_parameters(config)
    assert slow == pytest.approx(SIZES[size]["parameters"], rel=0.05)
    assert initial < 0.05 * slow


@pytest.mark.parametrize("preset", presets.names())
def test_sizes_fit_every_memory(preset: str) -> None:
    for backbone in ("lmm", "mac"):
        slow, _ = count_parameters(sized_config("170m", preset=preset, backbone=backbone))
        assert slow == pytest.approx(170e6, rel=0.05)


def test_state_a_person_could_serve() -> None:
    """The largest named model: no more than a Transformer's cache of a thousand tokens."""
    costs = account(sized_config("1.3b"), context=512)
    assert costs.state_bytes < 200e6
    assert 0 < costs.crossover < 1000
    assert next(name for name, _ in costs.rows()) == "slow parameters"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sized_config("7b"), "size='7b' is unknown; known: 170m"),
        (lambda: sized_config("170m", intermediate_size=64), "intermediate_size=64 must be left out"),
        (lambda: fitted_config(1_000_000, intermediate_size=64), "intermediate_size=64 must be left out"),
        (lambda: account(small_config(), context=0), "context=0"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
