"""What `make demo` shows: a small model reads a million tokens once, and answers."""

from atlas_memory.demonstration.scene import Question, Scene
from atlas_memory.demonstration.show import Answered, Show

__all__ = ["Scene", "Question", "Show", "Answered"]
