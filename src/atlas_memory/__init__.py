"""Sequence models that learn while they read."""

from atlas_memory.layers import Memory
from atlas_memory.ops import MemoryState, Monitors
from atlas_memory.spec import MemorySpec, presets

__version__ = "0.1.0"
__all__ = ["Memory", "MemorySpec", "MemoryState", "Monitors", "__version__", "presets"]
