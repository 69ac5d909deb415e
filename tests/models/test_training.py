"""Training: every memory learns a batch by heart, and the tools people train with take the model as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from atlas_memory.models.configuration_atlas import BACKBONES
from tests.models.support import PAIRS, layers_of, small_model, token_ids
from tests.support import assert_close

STEPS = 40
LEARNED = 0.1  # of a starting loss of log(22) = 3.1


@pytest.mark.parametrize(("preset", "backbone"), PAIRS)
def test_one_batch_is_memorised(preset: str, backbone: str) -> None:
    model = small_model(
        torch.float32,
        preset=preset,
        backbone=backbone,
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=32,
        initializer_range=0.02,
    )
    model.train()
    ids = token_ids(2, 11)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(STEPS):
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert model(ids, labels=ids).loss.item() < LEARNED


@pytest.mark.parametrize("backbone", BACKBONES)
def test_gradient_checkpointing_changes_nothing(backbone: str) -> None:
    model, ids = small_model(backbone=backbone, **layers_of("atlas", "mixed")).train(), token_ids(2, 11)
    losses, gradients = [], []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        outputs = model(ids, labels=ids)
        outputs.loss.backward()
        losses.append(outputs.loss)
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert outputs.past_key_values is None
    assert_close(losses[1], losses[0])
    for name, gradient in gradients[0].items():
        assert gradient.any(), name
        assert_close(gradients[1][name], gradient, name)


def test_checkpointing_that_would_lose_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="use_reentrant=True loses gradients of states"):
        small_model().gradient_checkpointing_enable({"use_reentrant": True})


def test_modes_change_nothing() -> None:
    model, ids = small_model(backbone="mac"), token_ids(2, 11)
    expected = model(ids).logits
    assert torch.equal(model.train()(ids).logits, expected)
    with torch.inference_mode():
        assert_close(model(ids).logits, expected)


@pytest.mark.parametrize("flash", [True, False])
def test_flattened_batches(flash: bool) -> None:
    """What DataCollatorWithFlattening makes of sequences: the loss is that of the sequences alone."""
    model, rows = small_model(backbone="mac"), [token_ids(1, n, seed=n) for n in (5, 3, 7)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash, return_position_ids=not flash)
    batch = collator([{"input_ids": row[0].tolist()} for row in rows])
    expected = sum(model(row, labels=row).loss * (row.shape[1] - 1) for row in rows) / 12
    assert_close(model(**batch).loss, expected, "loss", relative=1e-5)


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=True,
    )
    model = small_model(torch.float32, backbone="mag")
    rows = [{"input_ids": token_ids(1, 9)[0].tolist()}] * 4
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithFlattening())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_autocast() -> None:
    """Weights in float32, products in bfloat16, the memory's states in float32."""
    model, ids = small_model(torch.float32, backbone="mac", preset="atlas"), token_ids(2, 11)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(ids, labels=ids)
        outputs.loss.backward()
        model(ids, past_key_values=outputs.past_key_values)
    memory = outputs.past_key_values.layers[0].state.parts["memory"]
    assert {tensor.dtype for tensor in memory.tensors.values()} == {torch.float32}
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def _check_compiled(backbone: str, preset: str) -> None:
    torch.compiler.reset()
    model = small_model(backbone=backbone, preset=preset, num_hidden_layers=1)
    compiled, ids = torch.compile(model, backend="aot_eager"), token_ids(2, 6)
    outputs, expected = compiled(ids, labels=ids), model(ids, labels=ids)
    assert_close(outputs.logits, expected.logits, "logits")
    parameters = dict(model.named_parameters())
    gradients, expected_gradients = (
        torch.autograd.grad(each.loss, list(parameters.values())) for each in (outputs, expected)
    )
    for name, gradient, wanted in zip(parameters, gradients, expected_gradients, strict=True):
        assert_close(gradient, wanted, name)
    torch.compiler.reset()


# The compiler makes an object of every autograd function that it traces, which torch itself warns about.
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@traced
def test_compiled() -> None:
    _check_compiled("mag", "gated_deltanet")


@traced
@pytest.mark.slow
@pytest.mark.parametrize(("preset", "backbone"), PAIRS)
def test_compiled_family(preset: str, backbone: str) -> None:
    _check_compiled(backbone, preset)
