"""In which order documents are read: a function of the seed and the epoch alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Epoch(NamedTuple):
    """One pass over N documents."""

    documents: np.ndarray  # (N,) which, in their order
    ends: np.ndarray  # (N,) tokens read when each of them is done


class DocumentOrder:
    """Documents without end, epoch after epoch, each epoch in an order of its own.

    documents (N,): indices into `lengths`, the tokens of every document.
    """

    def __init__(self, documents: np.ndarray, lengths: np.ndarray, seed: int, shuffle: bool) -> None:
        self._documents, self._lengths = documents, lengths
        self._seed, self._shuffle = seed, shuffle
        self.count, self.tokens = len(documents), int(lengths[documents].sum())  # of one epoch
        self._kept: dict[int, Epoch] = {}

    def epoch(self, number: int) -> Epoch:
        if number not in self._kept:
            # A batch at the end of an epoch reaches into the next one: neighbours are worth keeping, no others.
            self._kept = {old: epoch for old, epoch in self._kept.items() if abs(old - number) == 1}
            self._kept[number] = self._make(number)
        return self._kept[number]

    def _make(self, number: int) -> Epoch:
        documents = self._documents
        if self._shuffle:
            # RandomState, since numpy promises never to change its numbers: an order outlives an upgrade.
            documents = documents[np.random.RandomState([self._seed, number]).permutation(self.count)]
        return Epoch(documents, np.cumsum(self._lengths[documents]))

    def document(self, number: int) -> int:
        """Which document is the one of this number, counted through all epochs."""
        epoch, place = divmod(number, self.count)
        return int(self.epoch(epoch).documents[place])

    def place(self, token: int) -> tuple[int, int]:
        """Document and place in it of the token of this number, counted through all epochs."""
        number, offset = divmod(token, self.tokens)
        documents, ends = self.epoch(number)
        found = int(np.searchsorted(ends, offset, side="right"))
        document = int(documents[found])
        return document, offset - int(ends[found]) + int(self._lengths[document])

    def finished(self, tokens: int) -> int:
        """How many documents are done after this many tokens, counted through all epochs."""
        number, offset = divmod(tokens, self.tokens)
        return number * self.count + int(np.searchsorted(self.epoch(number).ends, offset, side="right"))
