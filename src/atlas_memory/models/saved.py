"""Models on disk, to read and write with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from atlas_memory.models.modeling_atlas import AtlasForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_any(folder: str | Path) -> PreTrainedModel:
    """A causal language model of `save_pretrained`, ours or of others, on the best device there is, ready to be asked.

    In float32, whatever it was saved in: half precision is for autocast to choose, and to be told of.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except SafetensorError as error:
        raise ValueError(
            f"model={str(folder)!r}: its weights are damaged ({error}); copy or save them again."
        ) from error
    ready: PreTrainedModel = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return ready


def load_saved(folder: str | Path) -> AtlasForCausalLM:
    """A model of `save_pretrained` or `train`, loaded by `load_any`."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"model={str(folder)!r} has no config.json; it must be a folder such as OUT/final of `train`.")
    model = load_any(folder)
    if not isinstance(model, AtlasForCausalLM):
        raise ValueError(f"model={str(folder)!r} is a {type(model).__name__}; it must be a model of this library.")
    return model
