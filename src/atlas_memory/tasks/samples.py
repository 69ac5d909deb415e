"""What tasks have in common: a sample is a text in pieces, a question at its end, and a way to score answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

# Where an answer ends.
STOPS = (".", "\n")


class Examples(NamedTuple):
    """Token ids and what to say at each place: (N, T) both, int64; IGNORED where nothing is asked."""

    inputs: Tensor
    targets: Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    """One text to read and one thing to say at its end.

    pieces: makes the text anew, sentence by sentence, the question last; joined, it is the prompt. Every piece but the
    first begins with its space, so that tokenizers that split at spaces see the same words as in the joined text.
    """

    pieces: Callable[[], Iterator[str]]
    answer: str
    score: Callable[[str, str], bool]  # (what the model said, the answer) → right or wrong
    extra_tokens: int = 4  # how many more than the answer has are generated


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a result: samples of one task at one length, as texts (`sample`) or as token ids (`examples`)."""

    task: str
    length: int  # texts: GPT-2-equivalent tokens; token ids: tokens
    samples: int
    sample: Callable[[int], Sample] | None = None  # the same for the same number
    examples: Callable[[], Examples] | None = None
    # What a model says at every place (N, T) of examples; by default the most likely next token.
    said: Callable[[Any, Tensor], Tensor] | None = None
    check: Callable[[Any], object] | None = None  # raises if a loaded model cannot be asked, before anything is read
    details: dict[str, Any] = dataclasses.field(default_factory=dict)  # further columns of the result, such as a depth
    first: int = 0  # number of the first sample
    vocabulary: int | None = None  # of token ids: what a model's must have at least


def exact_match(said: str, answer: str) -> bool:
    """Whether what was said up to the first stop is the answer; case and outer spaces do not count.

    >>> exact_match(" bathroom. Mary went", "bathroom"), exact_match(" bathroom garden.", "bathroom")
    (True, False)
    """
    return up_to_stop(said).casefold() == answer.casefold()


def contains(said: str, answer: str) -> bool:
    """Whether the answer is somewhere in what was said."""
    return answer.casefold() in said.casefold()


def up_to_stop(said: str) -> str:
    text = said.lstrip()
    ends = [place for stop in STOPS if (place := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))].strip()


def with_spaces(sentences: Iterator[str]) -> Iterator[str]:
    """Each with the space before it, the first without."""
    for number, sentence in enumerate(sentences):
        yield f" {sentence}" if number else sentence


def haystack(
    background: Callable[[], Iterator[str]], length: float, hidden: Sequence[str], gaps: Callable[[int], list[int]]
) -> Iterator[str]:
    """Background sentences up to `length` characters, with `hidden` in between.

    gaps: of a number of sentences, in which gap (0: before the first) each hidden one goes, in order. The background is
    read twice, once to count: the text is never held.
    """
    room = length - sum(len(sentence) + 1 for sentence in hidden)
    places = gaps(sum(1 for _ in _fitting(background(), room)))
    told = 0
    for number, sentence in enumerate(_fitting(background(), room)):
        while told < len(hidden) and places[told] <= number:
            yield hidden[told]
            told += 1
        yield sentence
    yield from hidden[told:]


def _fitting(sentences: Iterator[str], room: float) -> Iterator[str]:
    """As many as there is room for, each with a space."""
    for sentence in sentences:
        room -= len(sentence) + 1
        if room < 0:
            return
        yield sentence
