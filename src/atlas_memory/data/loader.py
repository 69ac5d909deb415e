"""Batches for a training loop: prepared ahead by worker processes, resumed after the last one that was handed out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from atlas_memory.checks import check_whole
from atlas_memory.data.batch import Batch
from atlas_memory.data.lessons import Lessons, StoredLessons, make_exercise, mixed
from atlas_memory.data.options import DataConfig
from atlas_memory.data.rows import Rows, SegmentRows, check_ranks, make_rows
from atlas_memory.data.store import open_store
from atlas_memory.data.tokenizers import load_tokenizer

_Numbered = tuple[Batch, dict[str, Any]]


class Loader(Iterator[Batch]):
    """An iterator over one rank's batches.

    Its state is that of the batches it has handed out, not of those workers have prepared ahead, and is the same on
    every rank. Going on is `next`, also after `load_state_dict`.
    """

    def __init__(
        self, rows: Rows, rank: int = 0, world: int = 1, *, workers: int = 0, pin_memory: bool = False
    ) -> None:
        check_ranks(rank, world, rows.config.batch)
        check_whole("workers", workers, least=0)
        self._rows, self._rank, self._world = copy.copy(rows), rank, world
        self._workers, self._pin_memory = workers, pin_memory
        self._start = self._state = self._rows.state_dict()
        self._prepared: Iterator[_Numbered] | None = None

    def __next__(self) -> Batch:
        if self._prepared is None:
            self._prepared = iter(self._loader())
        batch, self._state = next(self._prepared)
        return batch

    def _loader(self) -> DataLoader[_Numbered]:
        return DataLoader(
            _Stream(self._rows_here(), self._rank, self._world),
            batch_size=None,
            num_workers=self._workers,
            pin_memory=self._pin_memory and torch.accelerator.is_available(),
            collate_fn=_unchanged,
            # Its own: making an iterator draws a number, and must not move the training's random numbers.
            generator=torch.Generator(),
        )

    def _rows_here(self) -> Rows:
        rows = copy.copy(self._rows)
        rows.load_state_dict(self._state)
        return rows

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.load_state_dict(state)  # raises, and changes nothing here, if it is of other data
        self._move(copy.deepcopy(state))

    def restart(self) -> None:
        """Back to the first batch: for an evaluation that is run again and again."""
        self._move(self._start)

    def _move(self, state: dict[str, Any]) -> None:
        self._prepared = None  # ends the workers
        self._state = state


class _Stream(IterableDataset[_Numbered]):
    """Batches, each with the state after it. Of W workers each prepares every W-th: so they are collected."""

    def __init__(self, rows: Rows, rank: int, world: int) -> None:
        self.rows, self.rank, self.world = rows, rank, world

    def __iter__(self) -> Iterator[_Numbered]:
        worker = get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rows, number = copy.copy(self.rows), 0
        while not rows.done:
            batch = rows.read(self.rank, self.world) if number % workers == mine else None
            rows.advance()
            if batch is not None:
                yield batch, rows.state_dict()
            number += 1


def _unchanged(item: Any) -> Any:
    return item


def make_loader(
    config: DataConfig, split: str = "train", rank: int = 0, world: int = 1, *, progress: bool = True
) -> Loader:
    """Tokenise, or find tokenised, and stand before the first batch."""
    if config.exercises:
        rows: Rows = SegmentRows(_mixture(config, split, progress), config.rows)
    else:
        rows = make_rows(open_store(config, split, progress=progress), config.rows)
    return Loader(rows, rank, world, workers=config.loading_workers, pin_memory=config.pin_memory)


def _mixture(config: DataConfig, split: str, progress: bool) -> Lessons:
    """Exercises, and documents of the source if there is a share for them."""
    tokenizer = load_tokenizer(config.tokenizer)
    parts = [(make_exercise(exercise, split).lessons(tokenizer), exercise.share) for exercise in config.exercises]
    if config.source_share:
        store = open_store(config, split, progress=progress)
        parts.append((StoredLessons(store, config.rows), config.source_share))
    return mixed(parts, config.rows.seed)
