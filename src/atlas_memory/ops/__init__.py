"""The operator: functions on tensors. `memorize_reference` is the definition, `memorize` its fast evaluation."""

from atlas_memory.ops.engine import memorize, recall
from atlas_memory.ops.monitors import Monitors
from atlas_memory.ops.newton_schulz import newton_schulz
from atlas_memory.ops.optimizers import Gates
from atlas_memory.ops.reference import memorize_reference
from atlas_memory.ops.state import MemoryState

__all__ = [
    "Gates",
    "MemoryState",
    "Monitors",
    "memorize",
    "memorize_reference",
    "newton_schulz",
    "recall",
]
