"""AtlasConfig: what it fills in, what it refuses, and that it survives a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from atlas_memory import AtlasConfig, presets
from tests.models.support import small_config


def test_defaults_fit_each_other() -> None:
    config = AtlasConfig()
    assert (config.preset, config.backbone) == ("atlas", "mag")
    assert config.layer_types == ["atlas"] * config.num_hidden_layers
    assert config.intermediate_size == 2048
    assert AtlasConfig(layer_types=["full_attention", "ttt"], num_hidden_layers=2).preset == "ttt"


def test_memory_fields_reach_the_memory() -> None:
    config = AtlasConfig(preset="titans", memory={"chunk": 16, "convolution": 2})
    assert config.memory_spec("titans") == presets.make("titans", chunk=16)
    assert config.block_arguments("titans")["memory"] == {"chunk": 16, "convolution": 2}


@pytest.mark.parametrize("preset", presets.names())
def test_through_a_file(preset: str, tmp_path: Path) -> None:
    config = small_config(preset=preset, backbone="mac", persistent_tokens=2)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, AtlasConfig)
    expected, found = ({**each.to_dict(), "_name_or_path": None} for each in (config, loaded))
    assert found == expected


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "count": ({"hidden_size": 0}, "hidden_size=0 must be a whole number of at least 1"),
    "kind of count": ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
    "truth as a count": ({"memory_heads": True}, "memory_heads=True"),
    "negative": ({"persistent_tokens": -1}, "persistent_tokens=-1 must be a whole number of at least 0"),
    "number": ({"rope_theta": -1.0}, "rope_theta=-1.0 must be a positive finite number"),
    "preset": ({"preset": "atals"}, "preset='atals' is unknown. Nearest: atlas"),
    "backbone": ({"backbone": "mix"}, "backbone='mix' is unknown; known: lmm, mal, mag, mac"),
    "misspelled": ({"hiden_size": 8}, "no field 'hiden_size'; did you mean 'hidden_size'"),
    "field of the memory": ({"memory": {"chunks": 3}}, "memory=.* does not fit: MemorySpec has no field 'chunks'"),
    "value of the memory": ({"memory": {"chunk": 0}}, "memory=.* does not fit: chunk=0"),
    "width of the convolution": ({"memory": {"convolution": 0}}, r"memory\['convolution'\]=0 must be a whole"),
    "kind of padding": ({"pad_token_id": "a"}, "pad_token_id='a' must be a whole number"),
    "padding beyond the vocabulary": ({"pad_token_id": 20, "vocab_size": 16}, "pad_token_id=20 must be below"),
    "heads": ({"hidden_size": 100}, "hidden_size=100 must be an even multiple of num_attention_heads=12"),
    "segment": ({"backbone": "mac", "segment_length": 100}, "segment_length=100 must be a multiple of .* chunk=64"),
    "no attention": ({"backbone": "lmm", "persistent_tokens": 2}, "persistent_tokens=2 needs a layer with attention"),
    "layers": ({"layer_types": ["atlas"]}, "layer_types=.* must name a type for each of num_hidden_layers=12"),
    "layer": ({"layer_types": ["x"] * 12}, "layer_types has 'x', which is unknown; known: full_attention"),
    "contradiction": ({"preset": "atlas", "layer_types": ["ttt"] * 12}, "preset='atlas' contradicts layer_types"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_named(name: str) -> None:
    fields, named = BAD[name]
    with pytest.raises(ValueError, match=named):
        AtlasConfig(**fields)


def test_changed_fields_are_checked_before_they_are_saved(tmp_path: Path) -> None:
    config = small_config()
    config.backbone = "mix"
    with pytest.raises(ValueError, match="backbone='mix' is unknown"):
        config.save_pretrained(tmp_path)
