"""The shipped model reading text, in a process of its own."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import psutil
import torch
from torch.utils.flop_counter import FlopCounterMode

from atlas_memory.data import load_tokenizer
from atlas_memory.models import AtlasCache
from atlas_memory.models.saved import load_saved
from atlas_memory.models.shipped import model_folder
from atlas_memory.tasks.background import open_background
from atlas_memory.tasks.evaluation import STEP

PIECES = 16  # of text, read again and again
TIMED = 8  # of them, read one after another without a stop, as an evaluation does
SENTENCES = 40_000


class Reader:
    """Reads rows of built-in text, STEP tokens a call as evaluations do; remembers the cache at named places.

    half: in bfloat16, as `--precision bfloat16` of an evaluation.
    """

    def __init__(self, rows: int, half: bool = False) -> None:
        self.half = half
        folder = model_folder("shipped")
        self.model, tokenizer = load_saved(folder), load_tokenizer(folder)
        sentences = itertools.islice(open_background("builtin").sentences("reading"), SENTENCES)
        ids = torch.tensor(tokenizer(" ".join(sentences))["input_ids"])
        self.pieces = ids[: PIECES * rows * STEP].view(PIECES, rows, STEP)
        self.cache = AtlasCache(len(self.model.model.layers))
        self.kept: dict[str, AtlasCache] = {}

    def read_until(self, tokens: int, name: str) -> dict[str, Any]:
        """Read on to place `tokens` of every row, keep the cache under a name, and say what is held there."""
        for place in range(self.cache.get_seq_length() // STEP, tokens // STEP):
            self._read(self.pieces[place % PIECES, None], self.cache)
        self.kept[name] = self.cache.copy()
        gc.collect()
        return {
            "tokens": self.cache.get_seq_length(),
            "resident_bytes": psutil.Process().memory_info().rss,
            "state_bytes": self.cache.nbytes,
        }

    def seconds(self, name: str) -> float:
        """Of TIMED pieces, going on from a kept place."""
        cache = self.kept[name].copy()
        start = time.perf_counter()
        self._read(self.pieces[:TIMED], cache)
        return time.perf_counter() - start

    def flops(self) -> int:
        """Of the matrix products of TIMED pieces."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # others than this one would not be counted
        with FlopCounterMode(display=False) as counter:
            self._read(self.pieces[:TIMED], self.kept["early"].copy())
        torch.set_num_threads(threads)
        return int(counter.get_total_flops())

    def _read(self, pieces: torch.Tensor, cache: AtlasCache) -> None:
        """(pieces, rows, STEP)"""
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.half):
            self.model.read(iter(pieces), cache, step=STEP, progress=False)
