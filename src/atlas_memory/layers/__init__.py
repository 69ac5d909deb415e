"""Modules: what learns in the outer loop."""

from atlas_memory.layers.memory import Memory

__all__ = ["Memory"]
