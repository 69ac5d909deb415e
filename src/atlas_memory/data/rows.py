"""Documents → rows of training batches, the same ones for any number of ranks, from any point on.

A `Rows` object stands before one global batch. `read` gives a rank its rows of it, `advance` goes to the next, and
`state_dict` is all it takes to stand there again. Shapes: R rows of a rank, T tokens of a row.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import numpy as np
import torch

from atlas_memory.checks import check_whole
from atlas_memory.data.batch import IGNORED, Batch
from atlas_memory.data.lessons import Lessons, StoredLessons, document_order
from atlas_memory.data.options import RowsConfig
from atlas_memory.data.store import Store


class Row(NamedTuple):
    """Tokens of one row, at most T of them, what follows each, and which are background."""

    tokens: np.ndarray
    targets: np.ndarray
    background: np.ndarray
    starts: np.ndarray


class Rows(abc.ABC):
    """What both ways share: lengths, ranks, and the frame of the state."""

    packed: bool

    def __init__(self, config: RowsConfig, pad: int, digest: str) -> None:
        self.config = config
        self.pad = pad  # the token that fills rows
        self.digest = digest  # equal for equal documents
        self.index = 0  # of the next global batch

    @property
    def length(self) -> int:
        """Tokens of a row of the next batch."""
        return self.config.length_at(self.index)

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether all epochs are read; never, if their number is not given."""

    def read(self, rank: int = 0, world: int = 1) -> Batch:
        """Rows rank, rank + world, ... of the next global batch. Reading moves nothing."""
        check_ranks(rank, world, self.config.batch)
        if self.done:
            raise ValueError(f"all {self.config.epochs} epochs are read.")
        rows = [self._row(row) for row in range(rank, self.config.batch, world)]
        shape = (len(rows), self.length)
        input_ids, targets = np.full(shape, self.pad, np.int64), np.full(shape, IGNORED, np.int64)
        background, mask, starts = (np.zeros(shape, bool) for _ in range(3))
        for place, row in enumerate(rows):
            real = len(row.tokens)
            input_ids[place, :real], targets[place, :real] = row.tokens, row.targets
            background[place, :real], mask[place, :real], starts[place, :real] = row.background, True, row.starts
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            targets=torch.from_numpy(targets),
            background=torch.from_numpy(background),
            mask=torch.from_numpy(mask),
            starts=torch.from_numpy(starts),
            packed=self.packed,
            index=self.index,
            target_count=self._target_count(),
            token_count=self._token_count(),
        )

    def advance(self) -> None:
        """Go on to the next global batch."""
        self._advance()
        self.index += 1

    @abc.abstractmethod
    def _row(self, row: int) -> Row:
        """One row of the next global batch."""

    @abc.abstractmethod
    def _target_count(self) -> int:
        """Targets of the next global batch."""

    @abc.abstractmethod
    def _token_count(self) -> int:
        """Real tokens of the next global batch."""

    @abc.abstractmethod
    def _advance(self) -> None: ...

    @abc.abstractmethod
    def _place(self) -> dict[str, Any]:
        """Where reading stands, in plain numbers and lists."""

    @abc.abstractmethod
    def _go_to(self, place: dict[str, Any]) -> None: ...

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a place to mean the same."""
        config = self.config
        return {"kind": config.kind, "seed": config.seed, "shuffle": config.shuffle, "data": self.digest}

    def state_dict(self) -> dict[str, Any]:
        """Small and plain, the same on every rank; can be written as JSON."""
        return {"identity": self._identity(), "index": self.index, "place": self._place()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was taken, whatever the number of ranks was."""
        missing = {"identity", "index", "place"} - set(state)
        if missing:
            raise ValueError(f"state has no {', '.join(sorted(missing))}; it must come from state_dict().")
        mine, theirs = self._identity(), state["identity"]
        different = [name for name in mine if theirs.get(name) != mine[name]]
        if different:
            listed = ", ".join(f"{name}: {theirs.get(name)!r} != {mine[name]!r}" for name in different)
            raise ValueError(f"state is of other rows than these: {listed}.")
        self.index = int(state["index"])
        self._go_to(state["place"])


class PackedRows(Rows):
    """Documents one after another, cut into rows without a gap: every token of an epoch is read once.

    The rows of a batch stand far apart: the stream of an epoch is divided into as many lanes as the batch has rows, and
    each row reads on in its own; rows one after another would mostly be of one document. Where lanes end, a row may be
    short.

    boundaries='reset': memories start empty at each document, and no target asks for the first token of the next one.
    boundaries='carry': a row is one sequence whatever documents it holds, and the next document is a target too.
    """

    def __init__(self, store: Store, config: RowsConfig) -> None:
        super().__init__(config, store.pad, store.digest)
        self.store, self.order = store, document_order(store, config)
        self.resets = config.boundaries == "reset"
        self.packed = self.resets
        self.epoch, self.position = 0, 0  # tokens read of each lane before the next batch
        self._end = None if config.epochs is None else config.epochs * self.order.tokens

    @property
    def done(self) -> bool:
        return self.config.epochs is not None and self.epoch >= self.config.epochs

    def _longest_lane(self) -> int:
        return -(-self.order.tokens // self.config.batch)

    def _bounds(self, row: int) -> tuple[int, int]:
        """Where in the stream of all epochs a row of the next batch begins and ends."""
        tokens, batch = self.order.tokens, self.config.batch
        first, last = row * tokens // batch, (row + 1) * tokens // batch
        begin = min(first + self.position, last)
        epoch = self.epoch * tokens
        return epoch + begin, epoch + min(begin + self.length, last)

    def _row(self, row: int) -> Row:
        begin, end = self._bounds(row)
        following = end + 1 if self._end is None else min(end + 1, self._end)  # the last token has a target too
        tokens, first = self._span(begin, following if end > begin else end)
        targets = np.full(end - begin, IGNORED, np.int64)
        targets[: max(len(tokens) - 1, 0)] = np.where(first[1:] & self.resets, IGNORED, tokens[1:])
        starts = first[: end - begin] & self.resets
        starts[:1] = True  # a row starts empty wherever its document began
        return Row(tokens[: end - begin], targets, np.zeros(end - begin, bool), starts)

    def _span(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the stream, and which of them are the first of a document."""
        tokens, first = np.empty(end - begin, np.int64), np.zeros(end - begin, bool)
        filled = 0
        while filled < len(tokens):
            document, place = self.order.place(begin + filled)
            piece = self.store.document(document)[place : place + len(tokens) - filled]
            tokens[filled : filled + len(piece)] = piece
            first[filled] = place == 0
            filled += len(piece)
        return tokens, first

    def _target_count(self) -> int:
        return sum(self._targets_between(*self._bounds(row)) for row in range(self.config.batch))

    def _token_count(self) -> int:
        bounds = [self._bounds(row) for row in range(self.config.batch)]
        return sum(end - begin for begin, end in bounds)

    def _targets_between(self, begin: int, end: int) -> int:
        if end == begin:
            return 0
        if self.resets:  # every token but the last of each document
            return end - begin - (self.order.finished(end) - self.order.finished(begin))
        return end - begin - (end == self._end)

    def _advance(self) -> None:
        self.position += self.length
        if self.position >= self._longest_lane():
            self.epoch, self.position = self.epoch + 1, 0

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "batch": self.config.batch}

    def _place(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def _go_to(self, place: dict[str, Any]) -> None:
        self.epoch, self.position = int(place["epoch"]), int(place["position"])


class SegmentRows(Rows):
    """Long documents as long documents: each row of the batch reads a lesson, a segment a batch, then takes the next.

    A row that is not `fresh` goes on where the same row of the batch before ended: carry its state, detached. The last
    segment of a lesson is padded. With a number of epochs, rows for which no lesson is left are all padding.
    """

    packed = False
    _NONE = -1

    def __init__(self, lessons: Lessons, config: RowsConfig) -> None:
        super().__init__(config, lessons.pad, lessons.digest)
        if config.epochs is not None and lessons.count is None:
            raise ValueError(f"epochs={config.epochs} must be None: exercises have no end.")
        self.lessons = lessons
        self._end = None if config.epochs is None or lessons.count is None else config.epochs * lessons.count
        self._taken = 0  # lessons given to rows so far
        self._numbers = [self._take() for _ in range(config.batch)]  # what each row reads
        self._offsets = [0] * config.batch  # where in it
        self._cuts: dict[int, Row] = {}  # of the next batch, which is asked for its rows and for the sums over them

    def _take(self) -> int:
        if self._taken == self._end:
            return self._NONE
        self._taken += 1
        return self._taken - 1

    @property
    def done(self) -> bool:
        return all(number == self._NONE for number in self._numbers)

    def _row(self, row: int) -> Row:
        if row not in self._cuts:
            self._cuts[row] = self._cut(row)
        return self._cuts[row]

    def _cut(self, row: int) -> Row:
        number, begin = self._numbers[row], self._offsets[row]
        if number == self._NONE:
            return Row(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool), np.empty(0, bool))
        cut = self.lessons.cut(number, begin, begin + self.length)
        starts = np.zeros(len(cut.tokens), bool)
        starts[:1] = begin == 0
        return Row(*cut, starts)

    def _target_count(self) -> int:
        return sum(int((self._row(row).targets != IGNORED).sum()) for row in range(self.config.batch))

    def _token_count(self) -> int:
        return sum(len(self._row(row).tokens) for row in range(self.config.batch))

    def _advance(self) -> None:
        length, self._cuts = self.length, {}
        for row, number in enumerate(self._numbers):
            self._offsets[row] += length
            if number == self._NONE or self._offsets[row] >= self.lessons.length(number):
                self._numbers[row], self._offsets[row] = self._take(), 0

    def __copy__(self) -> SegmentRows:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, _numbers=list(self._numbers), _offsets=list(self._offsets), _cuts={})
        return copied

    def _identity(self) -> dict[str, Any]:
        fixed = {"batch": self.config.batch, "minimum_tokens": self.config.minimum_tokens}
        return {**super()._identity(), **fixed}

    def _place(self) -> dict[str, Any]:
        return {"taken": self._taken, "numbers": list(self._numbers), "offsets": list(self._offsets)}

    def _go_to(self, place: dict[str, Any]) -> None:
        self._taken, self._cuts = int(place["taken"]), {}
        self._numbers, self._offsets = list(place["numbers"]), list(place["offsets"])


def make_rows(store: Store, config: RowsConfig) -> Rows:
    return PackedRows(store, config) if config.kind == "packed" else SegmentRows(StoredLessons(store, config), config)


def check_ranks(rank: int, world: int, batch: int) -> None:
    check_whole("rank", rank, least=0)
    check_whole("world", world)
    if rank >= world or world > batch:
        raise ValueError(f"rank={rank}, world={world}: rank must be less than world, and world at most batch={batch}.")
