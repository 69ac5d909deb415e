"""A long text with a few facts in it, and what one may ask at its end.

>>> scene = Scene(length=120)
>>> print(*scene.facts[:2], sep="\\n")
Sandra went back to the bedroom.
John moved to the hallway.
>>> print(*scene.questions[:2], sep="\\n")
Question(text='Where is Daniel?', answer='garden')
Question(text='Where is John?', answer='bathroom')
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from atlas_memory.tasks.babilong.language import read_sentence
from atlas_memory.tasks.babilong.solver import Solver
from atlas_memory.tasks.babilong.stories import simulate
from atlas_memory.tasks.babilong.stream import scattered
from atlas_memory.tasks.background import BUILTIN, open_background
from atlas_memory.tasks.lengths import characters_of
from atlas_memory.tasks.needle import DEPTHS, at_depth, depth_cells
from atlas_memory.tasks.samples import Cell, Sample, exact_match, haystack, with_spaces


class Question(NamedTuple):
    text: str
    answer: str


class Scene:
    """People walk about a house, in the middle of a book. length: GPT-2-equivalent tokens. book: a text file."""

    def __init__(self, length: int = 1_000_000, book: str = BUILTIN, seed: int = 0) -> None:
        self.length, self.seed = length, seed
        self._background = open_background(book)
        self.facts = list(simulate("qa1", seed).sentences)
        solver = Solver(self.facts)
        people = sorted({read_sentence(fact).subject for fact in self.facts})
        asked = [f"Where is {person}?" for person in people]
        self.questions = [Question(text, solver.answer(text).text) for text in asked]

    def pieces(self) -> Iterator[str]:
        """The text, sentence by sentence, anew every time."""
        seed = f"scene {self.seed}"
        background, gaps = functools.partial(self._background.sentences, seed), scattered(len(self.facts), seed)
        return with_spaces(haystack(background, characters_of(self.length), self.facts, gaps))


def needle_cells(lengths: tuple[int, ...], samples: int, book: str = BUILTIN) -> list[Cell]:
    """One fact at every depth of every length."""
    background = open_background(book)

    def sample(number: int, length: int, depth: float) -> Sample:
        fact = simulate("qa1", f"needle {number}").sentences[0]
        question = f"Where is {read_sentence(fact).subject}?"
        answer = Solver([fact]).answer(question).text
        sentences = functools.partial(background.sentences, f"demo needle {length} {depth} {number}")
        return Sample(functools.partial(at_depth, fact, depth, length, sentences, question), answer, exact_match)

    return depth_cells("one fact", sample, lengths, DEPTHS, samples)
