"""Small stores, and what a test asks of batches."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from atlas_memory.data import Batch, Rows, Store
from atlas_memory.data.store import read_store, write_store
from atlas_memory.data.tokenizers import Encoder, byte_tokenizer


@functools.cache
def byte_encoder() -> Encoder:
    return Encoder(byte_tokenizer())


def make_store(folder: Path, lengths: Sequence[int]) -> Store:
    """Documents of these lengths, the end token included; the first token of each is its number."""
    documents = [
        np.array([number % 200, *range(1, length - 1), byte_encoder().end][-length:])
        for number, length in enumerate(lengths)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    ingredients = {"lengths": list(lengths)}
    write_store(folder, documents, byte_encoder(), ingredients)
    return read_store(folder, _fingerprint_in(folder))


def _fingerprint_in(folder: Path) -> str:
    return str(json.loads((folder / "manifest.json").read_text())["fingerprint"])


def take(rows: Rows, count: int, rank: int = 0, world: int = 1) -> list[Batch]:
    batches = []
    for _ in range(count):
        if rows.done:
            break
        batches.append(rows.read(rank, world))
        rows.advance()
    return batches


def assert_same(left: Iterable[Batch], right: Iterable[Batch]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        for field in dataclasses.fields(Batch):
            assert _equal(getattr(mine, field.name), getattr(theirs, field.name)), field.name


def _equal(mine: object, theirs: object) -> bool:
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(mine, theirs)
    return mine == theirs


def merged(shares: Sequence[Batch]) -> Batch:
    """The global batch, from the shares of all ranks."""
    world, first = len(shares), shares[0]

    def merge(name: str) -> torch.Tensor:
        parts = [getattr(share, name) for share in shares]
        whole = parts[0].new_zeros(sum(map(len, parts)), *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            whole[rank::world] = part
        return whole

    merged = ("input_ids", "targets", "background", "mask", "starts")
    return dataclasses.replace(first, **{name: merge(name) for name in merged})
