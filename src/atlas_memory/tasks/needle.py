"""RULER's single needles in a haystack: S-NIAH 1, 2, 3, at every depth of every length.

| task | haystack | value |
|---|---|---|
| single_1 | one noisy paragraph, again and again | a number of seven digits |
| single_2 | books | a number of seven digits |
| single_3 | books | a UUID |

The score is whether the value appears in what the model says. Needle and values are the benchmark's; the noisy
paragraph and the words around the text are our own.

>>> sample = needle_sample("single_1", 0, length=120, depth=0.5)
>>> print("".join(sample.pieces()), "→", sample.answer)
A text with a special magic number in it follows; the number will be asked for at its end. The water is cold. The sand
is warm. The wind is mild. On it goes. Out and home again. The water is cold. The sand is warm. One of the special
magic numbers for keen-heron is: 9226692. The wind is mild. On it goes. Out and home again. The water is cold. The
sand is warm. The wind is mild. On it goes. Which special magic number for keen-heron does the text mention? The
special magic number for keen-heron is: → 9226692
"""

from __future__ import annotations

import functools
import itertools
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from atlas_memory.checks import check_choice, check_seed, check_whole
from atlas_memory.tasks.background import BUILTIN, Background, open_background
from atlas_memory.tasks.lengths import characters_of
from atlas_memory.tasks.samples import Cell, Sample, contains, haystack, with_spaces


class Kind(NamedTuple):
    noise: bool  # haystack of noise, else of the background
    values: str  # numbers or uuids


TASKS = {"single_1": Kind(True, "numbers"), "single_2": Kind(False, "numbers"), "single_3": Kind(False, "uuids")}
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

NEEDLE = "One of the special magic {values} for {word} is: {value}."
BEFORE = "A text with a special magic {one} in it follows; the {one} will be asked for at its end."
QUESTION = "Which special magic {one} for {word} does the text mention? The special magic {one} for {word} is:"
_ONE = {"numbers": "number", "uuids": "uuid"}

NOISE = (
    "The water is cold.",
    "The sand is warm.",
    "The wind is mild.",
    "On it goes.",
    "Out and home again.",
)
_FIRST = "amber brisk calm dusky early fabled grand humble ivory jolly keen lively misty noble olive plain"
_SECOND = "acorn beacon canyon dune ember falcon glacier heron island jetty kestrel lagoon meadow orchard pebble"


class Noise:
    """The paragraph over and over."""

    def sentences(self, seed: str) -> Iterator[str]:
        return itertools.cycle(NOISE)


def needle_sample(
    task: str, number: int, length: int, depth: float, background: Background | None = None, seed: int = 0
) -> Sample:
    """A needle after a share `depth` of the haystack's sentences. length: GPT-2-equivalent tokens of everything."""
    _check(task, depth)
    place = f"needle {task} {length} {depth} {seed} {number}"
    (needle,) = draw_needles(task, 1, random.Random(place))
    source = Noise() if TASKS[task].noise or background is None else background
    sentences = functools.partial(source.sentences, place)
    pieces = functools.partial(at_depth, needle.text, depth, length, sentences, needle.question, needle.before)
    # Room for a word or two before the value.
    return Sample(pieces, needle.value, contains, extra_tokens=16)


class Needle(NamedTuple):
    """A needle, what stands before the text it is in, and the question for its value."""

    text: str
    before: str
    question: str
    value: str


def draw_needles(task: str, number: int, draw: random.Random) -> list[Needle]:
    """Needles of different words."""
    values, words, made = TASKS[task].values, set[str](), list[Needle]()
    first, second = _FIRST.split(), _SECOND.split()
    while len(made) < number:
        value = (
            str(draw.randrange(10**6, 10**7))
            if values == "numbers"
            else str(uuid.UUID(int=draw.getrandbits(128), version=4))
        )
        word = f"{draw.choice(first)}-{draw.choice(second)}"
        if word not in words:
            words.add(word)
            parts = {"values": values, "one": _ONE[values], "word": word, "value": value}
            text, before, question = (form.format(**parts) for form in (NEEDLE, BEFORE, QUESTION))
            made.append(Needle(text, before, question, value))
    return made


def _check(task: str, depth: float) -> None:
    check_choice("task", task, tuple(TASKS))
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} must lie between 0, the start of the text, and 1, its end.")


def at_depth(
    needle: str, depth: float, length: int, background: Callable[[], Iterator[str]], question: str, before: str = ""
) -> Iterator[str]:
    """A text in pieces: the needle after a share `depth` of the sentences, the question last.

    length: GPT-2-equivalent tokens of everything. before: what comes first.
    """
    first = [before] if before else []
    room = characters_of(length) - sum(len(text) + 1 for text in (*first, question))
    text = haystack(background, room, [needle], lambda sentences: [round(depth * sentences)])
    return with_spaces(itertools.chain(first, text, [question]))


def depth_cells(
    task: str, sample: Callable[..., Sample], lengths: Sequence[int], depths: Sequence[float], samples: int
) -> list[Cell]:
    """A grid of one task. sample: of a number, `length` and `depth`."""
    return [
        Cell(task, length, samples, functools.partial(sample, length=length, depth=depth), details={"depth": depth})
        for length, depth in itertools.product(lengths, depths)
    ]


def cells(
    lengths: Sequence[int],
    samples: int,
    seed: int = 0,
    tasks: Sequence[str] = tuple(TASKS),
    background: str = BUILTIN,
    depths: Sequence[float] = DEPTHS,
) -> list[Cell]:
    """The grid: every task at every length and depth, `samples` of each."""
    check_whole("samples", samples)
    check_seed(seed)
    for task, depth in itertools.product(tasks, depths):
        _check(task, depth)
    opened = open_background(background)
    made = []
    for task in tasks:
        sample = functools.partial(needle_sample, task, background=opened, seed=seed)
        made += depth_cells(task, sample, lengths, depths, samples)
    return made
