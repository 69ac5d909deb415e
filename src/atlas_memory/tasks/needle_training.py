"""Needles to learn from: one or several in a text, asked for at its end, loss on the values alone.

>>> from atlas_memory.tasks.needle import Noise
>>> lines = document_lines("single_1", 2, 160, Noise(), seed="0")
>>> print("".join(f"{line.text}[{line.answer}]" if line.answer else line.text for line in lines))
A text with a special magic number in it follows; the number will be asked for at its end. One of the special magic
numbers for noble-lagoon is: 7432517. One of the special magic numbers for keen-ember is: 4748405. The water is cold.
The sand is warm. The wind is mild. On it goes. Out and home again. The water is cold. The sand is warm. The wind is
mild. On it goes. Out and home again. The water is cold. The sand is warm. Which special magic number for keen-ember
does the text mention? The special magic number for keen-ember is:[ 4748405.] Which special magic number for
noble-lagoon does the text mention? The special magic number for noble-lagoon is:[ 7432517.]
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, ClassVar

from atlas_memory.checks import check_whole
from atlas_memory.data.lessons import check_options
from atlas_memory.tasks.background import Background, background_digest, open_background
from atlas_memory.tasks.curriculum import DocumentOptions
from atlas_memory.tasks.lines import Line, LineExercise, answer_text, hidden_lines
from atlas_memory.tasks.needle import TASKS, Noise, draw_needles

MOST = 100  # of a text: there are 240 words for them


def document_lines(task: str, needles: int, length: int, background: Background, seed: str) -> Iterator[Line]:
    """Needles in gaps of their own, all asked for at the end, in an order of its own."""
    draw = random.Random(f"needles {seed}")
    hidden = draw_needles(task, needles, draw)
    asked = draw.sample(hidden, needles)
    lines = [
        Line(hidden[0].before, "", told=True),
        *(Line(needle.text, "", told=True) for needle in hidden),
        *(Line(needle.question, answer_text(needle.value), told=True) for needle in asked),
    ]

    def gaps(sentences: int) -> list[int]:
        return [0, *sorted(draw.randrange(sentences + 1) for _ in hidden), *(sentences for _ in asked)]

    return hidden_lines(lines, length, Noise() if TASKS[task].noise else background, seed, gaps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleOptions(DocumentOptions):
    """Each document draws how many needles there are, too."""

    TASKS: ClassVar = tuple(TASKS)
    STAGED: ClassVar = ("tasks", "lengths", "needles")

    tasks: tuple[str, ...] = tuple(TASKS)
    needles: int = 1  # at most; which one is asked for, its word tells

    def __post_init__(self) -> None:
        check_whole("needles", self.needles)
        if self.needles > MOST:
            raise ValueError(f"needles={self.needles} must be at most {MOST}.")
        super().__post_init__()


class Needles(LineExercise):
    """The exercise `needles` of a recipe: the options are the fields of NeedleOptions."""

    def __init__(self, options: dict[str, Any], split: str = "train") -> None:
        self.options, self.split = self.check(options), split
        self._background = open_background(self.options.background)

    @staticmethod
    def check(options: dict[str, Any]) -> NeedleOptions:
        """What the options mean, or ValueError; no file is opened."""
        check_options("needles", options, [field.name for field in dataclasses.fields(NeedleOptions)])
        return NeedleOptions(**options)

    def description(self) -> str:
        background = background_digest(self.options.background)
        return f"{dataclasses.replace(self.options, background=background)!r} {self.split}"

    def lines(self, number: int) -> Iterator[Line]:
        seed = f"{self.split} {self.options.seed} {number}"
        draw = random.Random(f"document {seed}")
        stage = self.options.at(number)
        task, length, needles = draw.choice(stage.tasks), draw.choice(stage.lengths), draw.randint(1, stage.needles)
        return document_lines(task, needles, length, self._background, seed)
