"""The model of a training step, against what can be counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.models.accounting import account, count_parameters
from atlas_memory.models.operations import Trace, trace_model
from atlas_memory.train import Recipe, load_recipe
from atlas_memory.train.hardware import HARDWARE, Hardware, find_hardware, this_machine
from atlas_memory.train.scaling import COLUMNS, Plan, communication_seconds, peak_memory, plan_of, predict, table
from tests.models.support import layers_of, small_config, small_model, token_ids

A100 = HARDWARE["a100-80"]


CONFIG = small_config(preset="gated_deltanet")  # the fewest operations: tracing takes time for each


def plan(**fields: object) -> Plan:
    return Plan(**{"config": CONFIG, "rows": 8, "length": 8, "rows_per_pass": 4, **fields})


@pytest.fixture(scope="module")
def traced() -> Trace:
    return plan().trace()


@pytest.mark.parametrize("layers", ["one", "mixed"])
def test_traced_flops_are_those_of_the_account(layers: str) -> None:
    config = small_config(**layers_of("titans", layers))
    traced = trace_model(config, 1, 16, torch.bfloat16)
    expected = account(config, context=16).training_flops * 16
    assert traced.total(lambda part: part.flops) == pytest.approx(expected, rel=0.01)


def test_activations_are_what_autograd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on an accelerator, for which is predicted: guards that cannot see keep what they may need.
    for module in ("stability", "dense"):
        monkeypatch.setattr(f"atlas_memory.ops.{module}.may_look", lambda x: False)
    config = small_config()
    model, kept = small_model(), {}
    parameters = {x.untyped_storage().data_ptr() for x in model.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), x)  # held, so that no address is used twice
        return x

    ids = token_ids(2, 32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(input_ids=ids, labels=ids, use_cache=False)
    dtype = next(model.parameters()).dtype
    predicted = trace_model(config, 2, 32, dtype).total(lambda part: part.activation_bytes)
    assert predicted == pytest.approx(sum(size for size, _ in kept.values()), rel=0.05)


def test_memory_by_strategy(traced: Trace) -> None:
    parameters = sum(count_parameters(CONFIG))
    whole = peak_memory(plan(), traced)
    assert (whole.weights, whole.gradients, whole.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    sharded = peak_memory(plan(accelerators=2, strategy="fsdp2"), traced)
    assert sharded.optimizer == whole.optimizer / 2
    assert peak_memory(plan(optimizer="muon"), traced).optimizer < whole.optimizer
    assert peak_memory(plan(gradient_checkpointing=True), traced).activations < whole.activations
    assert peak_memory(plan(carries=True), traced).states == 2 * whole.states


def test_communication_is_that_of_rings() -> None:
    parameters = sum(count_parameters(CONFIG))
    assert communication_seconds(plan(), A100, 1.0) == (0.0, 0.0)
    taken, hideable = communication_seconds(plan(accelerators=8), A100, 1.0)
    assert taken == pytest.approx(2 * 7 / 8 * 4 * parameters / A100.link)
    assert hideable == 1.0
    slower, _ = communication_seconds(plan(rows=16, accelerators=16), A100, 1.0)
    assert slower == pytest.approx(2 * 15 / 16 * 4 * parameters / (8 * A100.network))


def test_the_limit_is_where_the_time_goes(traced: Trace) -> None:
    endless = Hardware("x", 1e30, 1e30, 1e30, 0.0, True, 1e30, 1e30, 8)
    for field, value, limit in (
        ("flops", 1.0, "products"),
        ("bandwidth", 1.0, "traffic"),
        ("launch", 1.0, "launches"),
        ("link", 1e-9, "communication"),
        ("memory", 1.0, "memory"),
    ):
        hardware = dataclasses.replace(endless, **{field: value})
        assert predict(plan(accelerators=2), hardware, traced).limit == limit


def test_passes_cover_the_batch() -> None:
    assert (plan(rows=8, rows_per_pass=3).passes, plan(rows=8, rows_per_pass=3).rows_of_a_pass) == (3, 3)
    recipe = load_recipe("paper-340m")
    assert plan_of(recipe, 8).rows == recipe.data.rows.batch
    assert plan_of(recipe, 512).rows == 512


def test_a_recipe_that_starts_from_models(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    recipe = Recipe.model_validate({"start": [str(tmp_path)] * 2, "loop": {"steps": 1}})
    assert plan_of(recipe, 1).config.hidden_size == 2 * small_model().config.hidden_size


def test_a_table_of_a_recipe() -> None:
    recipe = load_recipe("quick", ["data.rows.length=8", "model.hidden_size=32", "model.preset=gated_deltanet"])
    rows = list(table(recipe, [], [1, 8], ["ddp", "fsdp2"], A100))
    assert [row[1] for row in rows] == ["1", "1", "8", "8"]
    assert all(len(row) == len(COLUMNS) for row in rows)


def test_this_machine_can_be_measured() -> None:
    machine = this_machine(repetitions=1)
    assert min(machine.flops, machine.bandwidth, machine.memory, machine.launch) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_hardware("abacus"), "hardware='abacus' is unknown; known: a100-40"),
        (lambda: plan(strategy="hope"), "strategy='hope' is unknown; known: ddp"),
        (lambda: plan(accelerators=3), "rows=8 must be a multiple of accelerators=3"),
        (lambda: plan(length=0), "length=0 must be at least 1"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_command() -> None:
    changes = ["--set", "data.rows.length=8", "--set", "model.preset=gated_deltanet"]
    result = CliRunner().invoke(app, ["scale", "quick", "--markdown", *changes])
    assert result.exit_code == 0, result.output
    assert "| recipe | 8 | ddp |" in result.output
    assert CliRunner().invoke(app, ["scale", "quick", "--hardware", "abacus"]).exit_code == 2
