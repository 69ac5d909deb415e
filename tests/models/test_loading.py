"""save_pretrained and from_pretrained: the same model comes back, and another one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.utils import hub as transformers_hub

from atlas_memory import AtlasForCausalLM, AtlasModel
from atlas_memory.models.configuration_atlas import BACKBONES
from atlas_memory.models.loading import LOADER
from tests.models.support import layers_of, small_config, small_model, token_ids
from tests.support import assert_close


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_there_and_back(backbone: str, tied: bool, tmp_path: Path) -> None:
    model = small_model(backbone=backbone, tie_word_embeddings=tied, **layers_of("atlas", "mixed"))
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(loaded, AtlasForCausalLM)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert not loaded.training
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    ids = token_ids(1, 9)
    assert_close(loaded(ids).logits, model(ids).logits)


def test_in_half_precision(tmp_path: Path) -> None:
    """Weights in bfloat16, the memory's states in float32."""
    small_model(torch.float32, preset="atlas").save_pretrained(tmp_path)
    loaded = AtlasForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cache = loaded(token_ids(1, 9)).past_key_values
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    for layer in cache.layers:
        assert {tensor.dtype for tensor in layer.state.parts["memory"].tensors.values()} == {torch.float32}
        assert layer.state.parts["attention"].keys.dtype == torch.bfloat16


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_placed_by_accelerate(device_map: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, ids = small_model(), token_ids(2, 6)
    model.save_pretrained(tmp_path)
    placed = AtlasForCausalLM.from_pretrained(tmp_path, device_map=device_map, dtype=torch.float64)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(placed.generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_placed_layer_by_layer() -> None:
    """With a hook around every layer, through which its state has to pass."""
    accelerate = pytest.importorskip("accelerate")
    model, (ids, mask) = small_model(), (token_ids(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]))
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    hooked = accelerate.cpu_offload(
        small_model(), execution_device=torch.device("cpu"), preload_module_classes=["AtlasDecoderLayer"]
    )
    assert torch.equal(hooked.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False), expected)


def test_base_model_and_head_from_each_other(tmp_path: Path) -> None:
    model, ids = small_model(), token_ids(1, 5)
    model.save_pretrained(tmp_path / "head")
    base = AtlasModel.from_pretrained(tmp_path / "head", dtype=torch.float64)
    assert_close(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    headed = AtlasForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    assert_close(headed.model(ids).last_hidden_state, model.model(ids).last_hidden_state)


class Hub:
    """In place of the real one: what was uploaded, by its name in the repository."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        return SimpleNamespace(repo_id=f"someone/{repo_id}")

    def create_commit(self, operations: list[Any], **options: Any) -> None:
        self.files = {operation.path_in_repo: str(operation.path_or_fileobj) for operation in operations}


@pytest.mark.parametrize("again", [False, True])
def test_an_upload_has_the_loader(again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a folder that has one: of what was there before, only changed files are uploaded."""
    hub, card = Hub(), SimpleNamespace(save=lambda path: Path(path).write_text("a card"))
    for module in (modeling_utils, transformers_hub):
        monkeypatch.setattr(module, "hf_api", lambda: hub)
        monkeypatch.setattr(module, "create_and_tag_model_card", lambda *_, **__: card)
    if again:
        small_model().save_pretrained(tmp_path / "pushed")
    small_model().save_pretrained(tmp_path / "pushed", push_to_hub=True)
    assert {"model.safetensors", "config.json", LOADER} <= set(hub.files)
    loaded = json.loads(Path(hub.files["config.json"]).read_text())["auto_map"]["AutoModelForCausalLM"]
    assert f"{loaded.partition('.')[0]}.py" == LOADER


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"preset": "ttt"}, "preset: 'titans' != 'ttt'"),
        ({"backbone": "mac"}, "backbone: 'mag' != 'mac'"),
        ({"config": small_config(preset="ttt")}, "preset: 'titans' != 'ttt'"),
    ],
)
def test_another_architecture_than_the_checkpoint(asked: dict[str, Any], named: str, tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    for loader in (AtlasForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=f"is another model than asked for: .*{named}"):
            loader.from_pretrained(tmp_path, **asked)


@pytest.mark.parametrize(
    "change", [{"preset": "atlas", "layer_types": ["atlas"] * 2}, {"backbone": "lmm"}, {"vocab_size": 29}]
)
def test_config_beside_weights_of_another_model(change: dict[str, Any], tmp_path: Path) -> None:
    """Where transformers would start the missing weights afresh, and say so only in its log."""
    small_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"the weights of .* do not fit its config"):
        AtlasForCausalLM.from_pretrained(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.block.memory.norm"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing model.layers.1.block.memory.norm"):
        AtlasForCausalLM.from_pretrained(tmp_path)
