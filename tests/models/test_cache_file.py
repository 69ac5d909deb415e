"""A cache on disk goes on as the one in memory does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atlas_memory.models.cache_file import FORMAT, load_cache, save_cache
from tests.models.support import PAIRS, layers_of, small_model, token_ids


@pytest.mark.parametrize(("preset", "backbone"), PAIRS[::3])
def test_reads_on_bit_for_bit(tmp_path: Path, preset: str, backbone: str) -> None:
    model = small_model(backbone=backbone, **layers_of(preset, "one"))
    cache = model.read(token_ids(2, 13), progress=False)
    save_cache(cache, tmp_path / "cache.safetensors", {"row": 3})
    loaded, notes = load_cache(tmp_path / "cache.safetensors")
    assert notes == {"row": 3} and loaded.get_seq_length() == 13
    more = token_ids(2, 5, seed=1)
    assert torch.equal(model(more, past_key_values=loaded).logits, model(more, past_key_values=cache).logits)


def test_a_mixed_stack_and_an_empty_cache(tmp_path: Path) -> None:
    model = small_model(backbone="mag", **layers_of("titans", "mixed"))
    cache = model.read(token_ids(1, 9), progress=False)
    save_cache(cache, tmp_path / "cache")
    loaded, _ = load_cache(tmp_path / "cache")
    more = token_ids(1, 4, seed=1)
    assert torch.equal(model(more, past_key_values=loaded).logits, model(more, past_key_values=cache).logits)
    save_cache(type(cache)(3), tmp_path / "cache")
    assert len(load_cache(tmp_path / "cache")[0].layers) == 3


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"no")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_cache(tmp_path / "cache")
    model = small_model()
    state = model.read(token_ids(1, 3), progress=False).layers[0].state
    assert state is not None
    state.parts["memory"].save(tmp_path / "memory")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="not a saved cache"):
        load_cache(tmp_path / "memory")


def test_damaged_descriptions(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "cache", {"format": FORMAT, "layers": "[{}]", "notes": "{}"})
    with pytest.raises(ValueError, match=r"path=.*cache' is a damaged cache: KeyError 'parts'"):
        load_cache(tmp_path / "cache")
