"""BABILong to learn from: stories in long texts with all their questions asked in place, loss on the answers alone.

A question in the middle is followed by its answer and a full stop, and reading goes on; five questions a story give
five times the supervision of one at the end. Documents of any length are read in segments, the memory carried from one
to the next.

>>> from atlas_memory.tasks.background import open_background
>>> lines = document_lines(simulate("qa1", seed=0), 0, open_background("builtin"), seed="0")
>>> print("".join(f"{line.text}[{line.answer}]" if line.answer else line.text for line in lines))
Sandra went back to the bedroom. John moved to the hallway. Where is Sandra?[ bedroom.] Mary travelled to the office.
Daniel journeyed to the kitchen. Where is Sandra?[ bedroom.] Daniel went to the garden. Mary travelled to the hallway.
Where is Daniel?[ garden.] John travelled to the office. Mary moved to the garden. Where is Daniel?[ garden.] Sandra
journeyed to the kitchen. John moved to the bathroom. Where is Mary?[ garden.]
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar

from atlas_memory.checks import check_whole
from atlas_memory.data.lessons import check_options
from atlas_memory.data.options import check_text
from atlas_memory.tasks.babilong.confusing import Confusing
from atlas_memory.tasks.babilong.facts import (
    SIMULATOR,
    TASKS,
    Question,
    Story,
    facts_digest,
    read_stories,
    story_files,
    told_on,
)
from atlas_memory.tasks.babilong.solver import Solver
from atlas_memory.tasks.babilong.stories import simulate
from atlas_memory.tasks.background import Background, background_digest, open_background
from atlas_memory.tasks.curriculum import DocumentOptions, check_number
from atlas_memory.tasks.lines import Line, LineExercise, answer_text, hidden_lines

HELD_OUT = 10  # of the stories of files every tenth is for validation


def document_lines(
    story: Story, length: int, background: Background, seed: str, more_questions: float = 0.0, apart: int = 0
) -> Iterator[Line]:
    """A story in `length` GPT-2-equivalent tokens: each sentence and question in its own gap, the last at the end.

    more_questions: how many questions of ours follow a sentence, on average, about anything that is known by then.
    apart: none of them was asked, with the same answer, in so many lines before it.
    """
    told: list[tuple[str, Question | None]] = list(story.lines())
    if more_questions:
        told = list(_asked_more(told, more_questions, apart, random.Random(f"more questions {seed}")))
    lines = [Line(text, answer_text(question.answer) if question else "", told=True) for text, question in told]
    draw = random.Random(f"training gaps {seed}")

    def gaps(sentences: int) -> list[int]:
        return [*sorted(draw.randrange(sentences + 1) for _ in lines[:-1]), sentences]

    return hidden_lines(lines, length, background, seed, gaps)


def _asked_more(
    told: Iterable[tuple[str, Question | None]], number: float, apart: int, draw: random.Random
) -> Iterator[tuple[str, Question | None]]:
    """With two and three supporting facts, what lies between fact and answer is asked for too."""
    solver, sentences = Solver(), 0
    recent: collections.deque[tuple[str, str]] = collections.deque(maxlen=apart)
    for text, question in told:
        yield text, question
        recent.append((text, question.answer if question else ""))
        if question is not None:
            continue
        solver.tell(text)
        sentences += 1
        for _ in range(int(number) + (draw.random() < number % 1)):
            if not (choices := _answerable(solver, recent)):
                break
            asked = draw.choice(draw.choice(choices))
            answer = solver.answer(asked).text
            recent.append((asked, answer))
            yield asked, Question(asked, answer, (), sentences)


def _answerable(solver: Solver, but: Collection[tuple[str, str]]) -> list[list[str]]:
    """Questions by kind, so that a kind with few is asked as often as one with many; `but` these with these answers."""
    kinds = list(solver.answerable().values())
    if but:
        kinds = [[asked for asked in kind if (asked, solver.answer(asked).text) not in but] for kind in kinds]
    return [kind for kind in kinds if kind]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(DocumentOptions):
    """Each document draws a story too."""

    TASKS: ClassVar = TASKS
    STAGED: ClassVar = ("tasks", "lengths", "more_questions", "apart", "stories")

    tasks: tuple[str, ...] = TASKS[:5]
    facts: str = SIMULATOR  # or PATHS of bAbI files, all of which are used: name the training files
    more_questions: float = 0.0  # further questions after a sentence, on average
    # Lines before one is asked again with the same answer. Repeated, they are answered by copying: the way in for tasks
    # of many sentences, which are not learned without; and a way out for qa4, of whose few questions most would be.
    apart: int = 0
    confusing: float = 0.0  # share of the background's sentences with people and things of the stories in them
    # Told one after another in each document: for tasks of few sentences (qa4), which would leave most of a row empty.
    # People who still carry things when the next story begins would make no sense: not for qa2, qa3, qa5.
    stories: int = 1

    def __post_init__(self) -> None:
        check_text("facts", self.facts)
        check_number("more_questions", self.more_questions)
        check_number("confusing", self.confusing, most=1)
        check_whole("apart", self.apart, least=0)
        check_whole("stories", self.stories, least=1)
        super().__post_init__()


class Babilong(LineExercise):
    """The exercise `babilong` of a recipe: the options are the fields of TrainingConfig."""

    def __init__(self, options: dict[str, Any], split: str = "train") -> None:
        self.config, self.split = self.check(options), split
        self._background = Confusing(open_background(self.config.background), self.config.confusing)
        self._stories = {task: self._source(task) for _, stage in self.config.over_time() for task in stage.tasks}

    @staticmethod
    def check(options: dict[str, Any]) -> TrainingConfig:
        """What the options mean, or ValueError; no file is opened."""
        check_options("babilong", options, [field.name for field in dataclasses.fields(TrainingConfig)])
        return TrainingConfig(**options)

    def _source(self, task: str) -> Callable[[random.Random], Story]:
        if self.config.facts == SIMULATOR:
            return functools.partial(_simulated, task)
        stories = [story for file in story_files(self.config.facts, task) for story in read_stories(file)]
        return functools.partial(_drawn, self._of_split(task, stories))

    def _of_split(self, task: str, stories: list[Story]) -> list[Story]:
        """No story is both learned from and measured with."""
        if self.split == "all":
            return stories
        if self.split == "train":
            return [story for number, story in enumerate(stories, 1) if number % HELD_OUT]
        if len(stories) < HELD_OUT:
            raise ValueError(
                f"facts={self.config.facts!r} has {len(stories)} stories of {task}: too few to hold out every "
                f"{HELD_OUT}th for split={self.split!r}; accepted: at least {HELD_OUT}, or facts={SIMULATOR!r}."
            )
        return stories[HELD_OUT - 1 :: HELD_OUT]

    def description(self) -> str:
        facts, background = facts_digest(self.config.facts), background_digest(self.config.background)
        return f"{dataclasses.replace(self.config, facts=facts, background=background)!r} {self.split}"

    def lines(self, number: int) -> Iterator[Line]:
        seed = f"{self.split} {self.config.seed} {number}"
        draw = random.Random(f"document {seed}")
        stage = self.config.at(number)
        task, length = draw.choice(stage.tasks), draw.choice(stage.lengths)
        story = told_on(self._stories[task](draw) for _ in range(stage.stories))
        return document_lines(story, length, self._background, seed, stage.more_questions, stage.apart)


def _simulated(task: str, draw: random.Random) -> Story:
    return simulate(task, f"training {draw.getrandbits(64)}")


def _drawn(stories: list[Story], draw: random.Random) -> Story:
    return draw.choice(stories)
