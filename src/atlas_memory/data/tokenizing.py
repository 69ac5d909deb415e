"""Many documents → token ids, in order, with a progress bar and, if asked, with worker processes."""

from __future__ import annotations

import collections
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from atlas_memory.data.tokenizers import Encoder

# Documents handed over at once: enough characters to be worth a message, few enough to keep the bar moving.
_CHARACTERS = 2**20
_DOCUMENTS = 1024
_AHEAD = 4  # batches in flight per worker: what bounds memory when documents come faster than tokens


def tokenise(texts: Iterable[str], encoder: Encoder, workers: int = 0, progress: bool = True) -> Iterator[np.ndarray]:
    """Ids of every document with its end token, in the order of the documents."""
    bar = Progress(
        TextColumn("tokenising"),
        BarColumn(),
        TextColumn("{task.fields[documents]:,} documents, {task.completed:,} tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )
    with bar:
        task = bar.add_task("tokenising", total=None, documents=0)
        for number, ids in enumerate(_encoded(_batches(texts), encoder, workers), 1):
            bar.update(task, advance=len(ids), documents=number)
            yield ids


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _CHARACTERS or len(batch) >= _DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(batches: Iterator[list[str]], encoder: Encoder, workers: int) -> Iterator[np.ndarray]:
    if not workers:
        for batch in batches:
            yield from encoder.encode(batch)
        return
    # Started afresh, not forked: the threads of the tokenizers do not survive a fork.
    context = multiprocessing.get_context("spawn")
    waiting: collections.deque[Future[list[np.ndarray]]] = collections.deque()
    with ProcessPoolExecutor(workers, context, initializer=_keep_encoder, initargs=(encoder,)) as pool:
        for batch in batches:
            waiting.append(pool.submit(_encode_with_kept, batch))
            if len(waiting) >= _AHEAD * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


_kept: list[Encoder] = []  # of a worker process: the tokenizer is sent once, not with every batch


def _keep_encoder(encoder: Encoder) -> None:
    _kept[:] = [encoder]


def _encode_with_kept(texts: list[str]) -> list[np.ndarray]:
    return _kept[0].encode(texts)
