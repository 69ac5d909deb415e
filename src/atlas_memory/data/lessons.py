"""What a row of the batch reads from beginning to end: stored documents, exercises, or a mixture of them.

Lessons are numbered without end. Lesson n is the same on every rank and after every resume.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from atlas_memory.checks import check_choice
from atlas_memory.data.batch import IGNORED
from atlas_memory.data.options import ExerciseConfig, RowsConfig, find_exercise
from atlas_memory.data.order import DocumentOrder
from atlas_memory.data.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Cut(NamedTuple):
    """Tokens of a lesson, what to predict after each, and which of them no question will ever be about."""

    tokens: np.ndarray
    targets: np.ndarray  # IGNORED where nothing is asked
    background: np.ndarray  # bool; never, where a lesson does not know


class Lessons(Protocol):
    pad: int
    digest: str  # equal for equal lessons
    count: int | None  # lessons of an epoch; None: no two are the same

    def length(self, number: int) -> int:
        """Tokens of a lesson."""

    def cut(self, number: int, begin: int, end: int) -> Cut: ...


class Exercise(Protocol):
    """Made from its options and a split; found by its name among the entry points of `options.EXERCISES`.

    The class may have `check(options)`, static, which raises ValueError where they are not accepted. It is called for
    every recipe that is read, and must open no files.
    """

    def text(self, number: int) -> str:
        """A lesson as text, for a tokenizer to learn its words from."""

    def lessons(self, tokenizer: PreTrainedTokenizerBase) -> Lessons: ...


def make_exercise(config: ExerciseConfig, split: str) -> Exercise:
    made: Exercise = find_exercise(config.name)(config.options, split)
    return made


class StoredLessons:
    """Documents of a store, every token a target."""

    def __init__(self, store: Store, config: RowsConfig) -> None:
        self.store, self.pad, self.digest = store, store.pad, store.digest
        self.document_lengths = np.diff(store.offsets)
        self.order = document_order(store, config, config.minimum_tokens)
        self.count: int | None = self.order.count

    def length(self, number: int) -> int:
        return int(self.document_lengths[self.order.document(number)])

    def cut(self, number: int, begin: int, end: int) -> Cut:
        document = self.store.document(self.order.document(number))
        tokens, after = document[begin:end], document[begin + 1 : end + 1]
        targets = np.full(len(tokens), IGNORED, np.int64)
        targets[: len(after)] = after
        return Cut(tokens, targets, np.zeros(len(tokens), bool))


def document_order(store: Store, config: RowsConfig, minimum_tokens: int = 1) -> DocumentOrder:
    lengths = np.diff(store.offsets)
    documents = np.flatnonzero(lengths >= minimum_tokens)
    if not len(documents):
        longest = int(lengths.max())
        raise ValueError(f"minimum_tokens={minimum_tokens} leaves no document; the longest has {longest} tokens.")
    return DocumentOrder(documents, lengths, config.seed, config.shuffle)


class MixedLessons:
    """Each lesson is drawn from one of several parts, with the chance of its share."""

    count: int | None = None

    def __init__(self, parts: Sequence[Lessons], shares: Sequence[float], seed: int) -> None:
        self.parts, self.shares, self.seed, self.pad = parts, shares, seed, parts[0].pad
        described = [*(part.digest for part in parts), *map(repr, shares), str(seed)]
        self.digest = hashlib.sha256(" ".join(described).encode()).hexdigest()

    def _part(self, number: int) -> Lessons:
        return random.Random(f"part {self.seed} {number}").choices(self.parts, self.shares)[0]

    def length(self, number: int) -> int:
        return self._part(number).length(number)

    def cut(self, number: int, begin: int, end: int) -> Cut:
        return self._part(number).cut(number, begin, end)


def mixed(parts: Sequence[tuple[Lessons, float]], seed: int) -> Lessons:
    """One part alone is not mixed."""
    lessons, shares = zip(*parts, strict=True)
    return lessons[0] if len(parts) == 1 else MixedLessons(lessons, shares, seed)


def check_options(name: str, options: dict[str, Any], known: Sequence[str]) -> None:
    """For exercises: every option must be known."""
    for option in options:
        check_choice(f"option of {name}", option, known)
