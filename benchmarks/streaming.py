"""A memory that reads on and on, in a process of its own."""

from __future__ import annotations

import gc
import time
from typing import Any

import psutil
import torch

from atlas_memory import Memory, MemoryState

CALL = 4096  # tokens


class Stream:
    """Reads random tokens in calls of CALL; remembers the state at named places."""

    def __init__(self, preset: str, dim: int, heads: int, key_width: int) -> None:
        torch.manual_seed(0)
        self.memory = Memory(dim, heads, preset, key_width=key_width)
        self.state: MemoryState | None = None
        self.kept: dict[str, MemoryState] = {}

    def read_until(self, tokens: int, name: str) -> dict[str, Any]:
        """Read on to place `tokens`, keep the state under a name, and say what is held there."""
        while (place := self._place()) < tokens:
            self._read(self.state, min(CALL, tokens - place), keep=True)
        assert self.state is not None
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self.state.tensors.values()):
            raise ArithmeticError(f"the state after {tokens} tokens is not finite.")
        self.kept[name] = self.state
        gc.collect()
        return {
            "tokens": self._place(),
            "resident_bytes": psutil.Process().memory_info().rss,
            "state_bytes": self.state.nbytes,
        }

    def seconds(self, name: str) -> float:
        """Of one call that goes on from a kept state."""
        return self._read(self.kept[name], CALL, keep=False)

    def _place(self) -> int:
        return 0 if self.state is None else int(self.state.tokens_seen[0])

    @torch.inference_mode()
    def _read(self, state: MemoryState | None, tokens: int, keep: bool) -> float:
        x = torch.randn(1, tokens, self.memory.dim)
        start = time.perf_counter()
        _, after = self.memory(x, state)
        taken = time.perf_counter() - start
        if keep:
            self.state = after
        return taken
