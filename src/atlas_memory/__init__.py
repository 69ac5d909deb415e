"""Sequence models that learn while they read."""

from atlas_memory.layers import Attention, Block, Memory
from atlas_memory.models import AtlasCache, AtlasConfig, AtlasForCausalLM, AtlasModel
from atlas_memory.ops import MemoryState, Monitors
from atlas_memory.spec import MemorySpec, presets

__version__ = "0.1.0"
__all__ = [
    "AtlasCache",
    "AtlasConfig",
    "AtlasForCausalLM",
    "AtlasModel",
    "Attention",
    "Block",
    "Memory",
    "MemorySpec",
    "MemoryState",
    "Monitors",
    "__version__",
    "presets",
]
