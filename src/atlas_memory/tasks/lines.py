"""Documents to learn from, line by line: what is told, what is asked with its answer, and what is background.

Loss is on the answers alone. Documents of any length are read in segments, the memory carried from one to the next.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from atlas_memory.data.batch import IGNORED
from atlas_memory.data.lessons import Cut
from atlas_memory.data.tokenizers import Encoder
from atlas_memory.tasks.background import Background
from atlas_memory.tasks.lengths import characters_of
from atlas_memory.tasks.samples import STOPS, haystack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Line(NamedTuple):
    """A piece of text; if it is a question, what to answer: ` bathroom.`; and whether it is told, not background."""

    text: str
    answer: str
    told: bool


def answer_text(answer: str) -> str:
    """As it follows its question."""
    return f" {answer}{STOPS[0]}"


def hidden_lines(
    told: Sequence[Line], length: int, background: Background, seed: str, gaps: Callable[[int], list[int]]
) -> Iterator[Line]:
    """Lines, with no space before them yet, in a background: `length` GPT-2-equivalent tokens of everything.

    gaps: of a number of background sentences, in which gap each line goes, in order.
    """
    # What is hidden is told apart from the background by being the very same objects, in order.
    said, waiting = [line.text + line.answer for line in told], 0
    for number, text in enumerate(haystack(lambda: background.sentences(seed), characters_of(length), said, gaps)):
        space = " " if number else ""
        if waiting < len(said) and text is said[waiting]:
            yield told[waiting]._replace(text=space + told[waiting].text)
            waiting += 1
        else:
            yield Line(space + text, "", told=False)


def encode(lines: Iterable[Line], encoder: Encoder) -> Cut:
    """Token ids of a document, its end token last; its targets, the answers' tokens; what is background."""
    lines = list(lines)
    texts = [text for line in lines for text in (line.text, line.answer)]
    parts = [ids[:-1] for ids in encoder.encode(texts)]
    tokens = np.concatenate([*parts, [encoder.end]]).astype(np.int64)
    lengths = [len(part) for part in parts]
    asked = np.repeat([place % 2 == 1 for place in range(len(parts))], lengths)
    targets = np.full(len(tokens), IGNORED, np.int64)
    targets[:-2] = np.where(asked[1:], tokens[1:-1], IGNORED)
    background = np.zeros(len(tokens), bool)
    background[:-1] = np.repeat([not line.told for line in lines for _ in range(2)], lengths)
    return Cut(tokens, targets, background)


class Documents(Protocol):
    """Document n is a function of the options, the split and n."""

    def description(self) -> str:
        """Equal for equal documents: of files what is in them, not where they lie."""

    def lines(self, number: int) -> Iterator[Line]: ...


class LineExercise:
    """What exercises of such documents have in common (see `data.lessons.Exercise`)."""

    def text(self: Documents, number: int) -> str:
        return "".join(line.text + line.answer for line in self.lines(number))

    def lessons(self: Documents, tokenizer: PreTrainedTokenizerBase) -> LineLessons:
        return LineLessons(self, Encoder(tokenizer))


class LineLessons:
    """Documents as tokens, with loss on the answers alone."""

    count: int | None = None

    def __init__(self, exercise: Documents, encoder: Encoder) -> None:
        self.exercise, self.encoder, self.pad = exercise, encoder, encoder.pad
        described = f"{exercise.description()} {encoder.fingerprint}"
        self.digest = hashlib.sha256(described.encode()).hexdigest()
        self._keep()

    def _keep(self) -> None:
        # A document is asked for its length and its cuts, segment after segment, by as many rows as a batch has.
        self._document = functools.lru_cache(maxsize=512)(self.document)

    def document(self, number: int) -> Cut:
        return encode(self.exercise.lines(number), self.encoder)

    def length(self, number: int) -> int:
        return len(self._document(number).tokens)

    def cut(self, number: int, begin: int, end: int) -> Cut:
        return Cut(*(part[begin:end] for part in self._document(number)))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_document"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._keep()
