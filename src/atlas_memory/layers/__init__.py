"""Modules: what learns in the outer loop."""

from atlas_memory.layers.attention import Attention
from atlas_memory.layers.block import Block
from atlas_memory.layers.memory import Memory
from atlas_memory.layers.mixers import MIXERS
from atlas_memory.layers.states import AttentionState, BlockState

__all__ = ["MIXERS", "Attention", "AttentionState", "Block", "BlockState", "Memory"]
