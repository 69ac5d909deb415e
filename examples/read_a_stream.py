"""Read more than fits: a stream in pieces, a saved memory, and a question to it."""

import tempfile
from pathlib import Path

import torch

from atlas_memory import Memory, MemoryState

torch.manual_seed(0)
memory = Memory(dim=64, heads=2, preset="atlas", key_width=16).eval()

state = None
with torch.inference_mode():
    for _ in range(10):
        piece = torch.randn(1, 1000, 64)  # anything that arrives in pieces
        _, state = memory(piece, state)
        print(f"{int(state.tokens_seen[0]):6d} tokens read, {state.nbytes:,} bytes of state")

    path = Path(tempfile.mkdtemp()) / "stream.safetensors"
    state.save(path)
    later = MemoryState.load(path, memory.spec)
    print("asked:", memory.recall(torch.randn(1, 3, 64), later).shape)
