"""BABILong: the facts of a question scattered over a long text, the question at its end.

The authors' protocol: one question with the facts before it is a sample; the facts keep their order; background
sentences are read on from a random place of a random book until the length is reached; each fact goes to a uniformly
drawn gap between them; the question comes last. The text is made as a stream, piece by piece, in any length.

>>> from atlas_memory.tasks.background import open_background
>>> source = Facts("qa1", "simulator", seed=0)
>>> sample = source.sample(3, length=150, background=open_background("builtin"))
>>> print("".join(sample.pieces()), "→", sample.answer)
John moved to the bathroom. Daniel moved to the garden. In the year of the flood the ferryman and the captain painted
their mirror in a faded silence. John went to the bedroom. It was said at the edge of the forest that every baker once
praised a tired lantern. The anchor that the miller studied after the long winter was more sudden than the old ledger.
Sandra journeyed to the garden. Mary travelled to the kitchen. Nobody along the north road remembered why the fiddler
had borrowed the faded clock. Daniel went back to the hallway. Where is Daniel? → hallway
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence

from atlas_memory.checks import check_choice, check_seed, check_whole
from atlas_memory.tasks.babilong.facts import SIMULATOR, TASKS, Asked, asked, measuring_files, read_stories
from atlas_memory.tasks.babilong.stories import simulate
from atlas_memory.tasks.background import BUILTIN, Background, open_background
from atlas_memory.tasks.lengths import characters_of
from atlas_memory.tasks.samples import Cell, Sample, exact_match, haystack, with_spaces


class Facts:
    """The questions of a task in a fixed order: sample n is the same for every model, length and background."""

    def __init__(self, task: str, paths: str = SIMULATOR, seed: int = 0) -> None:
        check_choice("task", task, TASKS)
        check_seed(seed)
        self.task, self.seed, self._paths = task, seed, paths
        self._read: list[Asked] | None = None
        if paths != SIMULATOR:
            stories = [story for file in measuring_files(paths, task) for story in read_stories(file)]
            self._read = list(asked(stories))
            random.Random(f"{task} {seed}").shuffle(self._read)

    def check_count(self, samples: int, first: int) -> None:
        if self._read is not None and first + samples > len(self._read):
            raise ValueError(
                f"samples={samples}, first={first}: facts={self._paths!r} has {len(self._read)} questions of "
                f"{self.task}; accepted: at most that many in all, or facts='{SIMULATOR}'."
            )

    def question(self, number: int) -> Asked:
        if self._read is not None:
            return self._read[number]
        questions = list(asked([simulate(self.task, f"{self.seed} {number}")]))
        return random.Random(f"question {self.seed} {number}").choice(questions)

    def sample(self, number: int, length: int, background: Background) -> Sample:
        """length: GPT-2-equivalent tokens of everything; facts alone if there is no room for more."""
        question = self.question(number)
        seed = f"{self.task} {length} {self.seed} {number}"
        return Sample(functools.partial(_pieces, question, length, background, seed), question.answer, exact_match)


def _pieces(question: Asked, length: int, background: Background, seed: str) -> Iterator[str]:
    room = characters_of(length) - len(question.question) - 1
    gaps = scattered(len(question.sentences), f"gaps {seed}")

    def text() -> Iterator[str]:
        yield from haystack(lambda: background.sentences(seed), room, question.sentences, gaps)
        yield question.question

    return with_spaces(text())


def scattered(number: int, seed: str) -> Callable[[int], list[int]]:
    """The gaps of a haystack in which so many sentences go, each anywhere, in their order."""
    draw = random.Random(seed)
    return lambda sentences: sorted(draw.randrange(sentences + 1) for _ in range(number))


def cells(
    lengths: Sequence[int],
    samples: int,
    seed: int = 0,
    tasks: Sequence[str] = TASKS[:5],
    facts: str = SIMULATOR,
    background: str = BUILTIN,
    first: int = 0,
) -> list[Cell]:
    """The evaluation: every task at every length, samples number `first` and following."""
    check_whole("samples", samples)
    check_whole("first", first, least=0)
    opened = open_background(background)
    made = []
    for task in tasks:
        source = Facts(task, facts, seed)
        source.check_count(samples, first)
        for length in lengths:
            sample = functools.partial(source.sample, length=length, background=opened)
            made.append(Cell(task, length, samples, sample, first=first))
    return made
