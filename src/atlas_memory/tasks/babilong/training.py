"""BABILong to learn from: stories in long texts with all their questions asked in place, loss on the answers alone.

A question in the middle is followed by its answer and a full stop, and reading goes on; five questions a story give
five times the supervision of one at the end. Documents of any length are read in segments, the memory carried from one
to the next.

>>> from atlas_memory.tasks.background import open_background
>>> lines = document_lines(simulate("qa1", seed=0), 0, open_background("builtin"), seed="0")
>>> print("".join(f"{text}[{answer}]" if answer else text for text, answer in lines))
Sandra went back to the bedroom. John moved to the hallway. Where is Sandra?[ bedroom.] Mary travelled to the office.
Daniel journeyed to the kitchen. Where is Sandra?[ bedroom.] Daniel went to the garden. Mary travelled to the hallway.
Where is Daniel?[ garden.] John travelled to the office. Mary moved to the garden. Where is Daniel?[ garden.] Sandra
journeyed to the kitchen. John moved to the bathroom. Where is Mary?[ garden.]
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atlas_memory.data.batch import IGNORED
from atlas_memory.data.options import RowsConfig, check_choice, check_whole
from atlas_memory.data.rows import Row, Rows
from atlas_memory.data.tokenizers import Encoder
from atlas_memory.tasks.babilong.facts import TASKS, Question, Story, read_stories
from atlas_memory.tasks.babilong.stories import simulate
from atlas_memory.tasks.babilong.stream import SIMULATOR
from atlas_memory.tasks.background import BUILTIN, Background, open_background
from atlas_memory.tasks.files import find_files
from atlas_memory.tasks.lengths import characters_of
from atlas_memory.tasks.samples import STOPS, haystack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Line(NamedTuple):
    """A piece of text, and, if it is a question, what to answer: ` bathroom.`"""

    text: str
    answer: str


def document_lines(story: Story, length: int, background: Background, seed: str) -> Iterator[Line]:
    """A story in `length` GPT-2-equivalent tokens: each sentence and question in its own gap, the last at the end."""
    told: list[tuple[str, Question | None]] = list(story.lines())
    said = [text if question is None else f"{text}{_answer(question)}" for text, question in told]
    draw = random.Random(f"training gaps {seed}")

    def gaps(sentences: int) -> list[int]:
        return [*sorted(draw.randrange(sentences + 1) for _ in said[:-1]), sentences]

    # The hidden lines are told apart from the background by being the very same objects, in order.
    waiting = 0
    for number, text in enumerate(haystack(lambda: background.sentences(seed), characters_of(length), said, gaps)):
        space = " " if number else ""
        if waiting < len(said) and text is said[waiting]:
            plain, question = told[waiting]
            waiting += 1
            yield Line(space + plain, "" if question is None else _answer(question))
        else:
            yield Line(space + text, "")


def _answer(question: Question) -> str:
    return f" {question.answer}{STOPS[0]}"


class Document(NamedTuple):
    tokens: np.ndarray  # (T,)
    targets: np.ndarray  # (T,) what follows each token where that belongs to an answer, else IGNORED


def encode(lines: Iterator[Line], encoder: Encoder) -> Document:
    """Token ids of a document, its end token last, and its targets."""
    texts = [part for line in lines for part in line]  # text, answer, text, answer, …
    parts = [ids[:-1] for ids in encoder.encode(texts)]
    tokens = np.concatenate([*parts, [encoder.end]]).astype(np.int64)
    asked = np.repeat([place % 2 == 1 for place in range(len(parts))], [len(part) for part in parts])
    targets = np.full(len(tokens), IGNORED, np.int64)
    targets[:-2] = np.where(asked[1:], tokens[1:-1], IGNORED)
    return Document(tokens, targets)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Which documents: each draws a task, a length and a story. PATHS: a folder, a glob or a list with commas."""

    tasks: tuple[str, ...] = TASKS[:5]
    lengths: tuple[int, ...] = (0,)  # GPT-2-equivalent tokens
    facts: str = SIMULATOR  # or PATHS of bAbI files, all of which are used: name the training files
    background: str = BUILTIN  # or PATHS of text files
    seed: int = 0

    def __post_init__(self) -> None:
        for task in self.tasks or ("",):
            check_choice("task", task, TASKS)
        for length in self.lengths or (-1,):
            check_whole("length", length, least=0)
        check_whole("seed", self.seed, least=0)

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


class Documents:
    """Document n is a function of the configuration and n."""

    def __init__(self, config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.encoder = config, Encoder(tokenizer)
        self._background = open_background(config.background)
        self._stories = {task: self._source(task) for task in config.tasks}

    def _source(self, task: str) -> Callable[[random.Random], Story]:
        if self.config.facts == SIMULATOR:
            return functools.partial(_simulated, task)
        files = find_files("facts", self.config.facts, (".txt",))
        named = [file for file in files if file.name.partition("_")[0].partition(".")[0] == task]
        stories = [story for file in named for story in read_stories(file)]
        if not stories:
            raise ValueError(f"facts={self.config.facts!r} has no file of {task}, such as {task}_train.txt.")
        return functools.partial(_drawn, stories)

    def __getitem__(self, number: int) -> Document:
        draw = random.Random(f"document {self.config.seed} {number}")
        task, length = draw.choice(self.config.tasks), draw.choice(self.config.lengths)
        story = self._stories[task](draw)
        lines = document_lines(story, length, self._background, f"{self.config.seed} {number}")
        return encode(lines, self.encoder)


def _simulated(task: str, draw: random.Random) -> Story:
    return simulate(task, f"training {draw.getrandbits(64)}")


def _drawn(stories: list[Story], draw: random.Random) -> Story:
    return draw.choice(stories)


class TrainingRows(Rows):
    """Global batches of segments, for `data.Loader`: each row reads one document after another, a segment a batch.

    A row that is not `fresh` goes on where the same row of the batch before ended: carry its state, detached.
    """

    packed = False

    def __init__(self, documents: Documents, config: RowsConfig) -> None:
        if config.kind != "segments" or config.epochs is not None:
            raise ValueError(f"rows must be of kind 'segments' without epochs, got {config}.")
        self.documents, self.config = documents, config
        self.index, self._set_length = 0, None
        self._numbers, self._offsets = list(range(config.batch)), [0] * config.batch
        self._document = functools.lru_cache(maxsize=2 * config.batch)(documents.__getitem__)

    @property
    def pad(self) -> int:
        return self.documents.encoder.pad

    @property
    def digest(self) -> str:
        return self.documents.config.digest + self.documents.encoder.fingerprint

    @property
    def epochs_read(self) -> float:
        return 0.0

    @property
    def done(self) -> bool:
        return False

    def _row(self, row: int) -> Row:
        document, begin = self._document(self._numbers[row]), self._offsets[row]
        cut = slice(begin, begin + self.length)
        tokens = document.tokens[cut]
        starts = np.zeros(len(tokens), bool)
        starts[:1] = begin == 0
        return Row(tokens, document.targets[cut], starts)

    def _target_count(self) -> int:
        return sum(int((self._row(row).targets != IGNORED).sum()) for row in range(self.config.batch))

    def _advance(self) -> None:
        numbers, offsets = [], []
        following = max(self._numbers) + 1
        for number, offset in zip(self._numbers, self._offsets, strict=True):
            offset += self.length
            if offset >= len(self._document(number).tokens):
                number, offset, following = following, 0, following + 1
            numbers.append(number)
            offsets.append(offset)
        self._numbers, self._offsets = numbers, offsets

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "batch": self.config.batch}

    def _place(self) -> dict[str, Any]:
        return {"numbers": list(self._numbers), "offsets": list(self._offsets)}

    def _go_to(self, place: dict[str, Any]) -> None:
        self._numbers, self._offsets = list(place["numbers"]), list(place["offsets"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_document"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._document = functools.lru_cache(maxsize=2 * self.config.batch)(self.documents.__getitem__)
