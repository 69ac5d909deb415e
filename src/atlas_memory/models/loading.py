"""What stands beside a checkpoint, and whether it is of the model it is loaded into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from atlas_memory.models.configuration_atlas import AtlasConfig

# Fields that decide which parameters there are; another value of one of them is another model.
ARCHITECTURE = ("backbone", "preset", "layer_types")

# Arguments of from_pretrained that say where the configuration is.
PLACE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


# For programs that import transformers alone: with trust_remote_code they run this file, which brings the package in.
LOADER = "loading_atlas.py"
LOADER_TEXT = '''"""Brings in the classes of this model: pip install atlas-memory."""

from atlas_memory import AtlasConfig, AtlasForCausalLM, AtlasModel

__all__ = ["AtlasConfig", "AtlasForCausalLM", "AtlasModel"]
'''
AUTO_MAP = {
    auto: f"{Path(LOADER).stem}.{name}"
    for auto, name in (
        ("AutoConfig", "AtlasConfig"),
        ("AutoModel", "AtlasModel"),
        ("AutoModelForCausalLM", "AtlasForCausalLM"),
    )
}


def write_loader(folder: Any) -> None:
    Path(folder, LOADER).write_text(LOADER_TEXT, encoding="utf-8")


def check_same_architecture(path: Any, arguments: Mapping[str, Any]) -> None:
    """Raise where a config given with the path, or a field of one, names another architecture than the checkpoint."""
    config = arguments.get("config")
    if path is None or (config is not None and not isinstance(config, PreTrainedConfig)):
        return
    asked = {name: arguments[name] for name in ARCHITECTURE if name in arguments}
    if config is not None:
        asked |= {name: getattr(config, name, None) for name in ARCHITECTURE}
    if not asked:
        return
    place = {name: arguments[name] for name in PLACE if arguments.get(name) is not None}
    stored = AtlasConfig.from_pretrained(path, **place)
    different = [
        f"{name}: {getattr(stored, name)!r} != {value!r}"
        for name, value in asked.items()
        if getattr(stored, name) != value
    ]
    if different:
        raise ValueError(f"the checkpoint {str(path)!r} is another model than asked for: {'; '.join(different)}.")


def check_weights_found(path: Any, info: Mapping[str, Iterable[Any]], resizes: bool) -> None:
    """Raise where the weights are not those of the configuration beside them: transformers would start afresh.

    Weights outside of the layers may be absent, as the head is from a checkpoint of AtlasModel; with `resizes`, weights
    of other sizes may be there.
    """
    wrong = [
        f"{kind.removesuffix('_keys')} {key if isinstance(key, str) else key[0]}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for key in sorted(info.get(kind, ()))
        if (not resizes if kind == "mismatched_keys" else "layers." in key)
    ]
    if wrong:
        shown = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise ValueError(
            f"the weights of {str(path)!r} do not fit its config; is it of another preset, backbone or size? {shown}."
        )
