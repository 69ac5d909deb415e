"""Models on disk, to read and write with."""

from __future__ import annotations

from pathlib import Path

import torch

from atlas_memory.models.modeling_atlas import AtlasForCausalLM


def load_saved(folder: str | Path) -> AtlasForCausalLM:
    """A model of `save_pretrained` or `train`, on the best device there is, ready to be asked."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"model={str(folder)!r} has no config.json; it must be a folder such as OUT/final of `train`.")
    model: AtlasForCausalLM = AtlasForCausalLM.from_pretrained(folder)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # type: ignore[arg-type]
