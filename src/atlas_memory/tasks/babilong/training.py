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
import hashlib
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atlas_memory.checks import check_choice, check_whole
from atlas_memory.data.batch import IGNORED
from atlas_memory.data.lessons import Cut, check_options
from atlas_memory.data.options import check_text
from atlas_memory.data.tokenizers import Encoder
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
from atlas_memory.tasks.background import BUILTIN, Background, background_digest, open_background
from atlas_memory.tasks.lengths import characters_of
from atlas_memory.tasks.samples import STOPS, haystack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN = "from"  # which document a stage of the curriculum holds
STAGED = ("tasks", "lengths", "more_questions", "apart", "stories")
HELD_OUT = 10  # of the stories of files every tenth is for validation


class Line(NamedTuple):
    """A piece of text; if it is a question, what to answer: ` bathroom.`; and whether the story has it."""

    text: str
    answer: str
    told: bool


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
            yield Line(space + plain, "" if question is None else _answer(question), told=True)
        else:
            yield Line(space + text, "", told=False)


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


def _answer(question: Question) -> str:
    return f" {question.answer}{STOPS[0]}"


def encode(lines: Iterable[Line], encoder: Encoder) -> Cut:
    """Token ids of a document, its end token last; its targets, the answers' tokens; what is not of the story."""
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


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Which documents: each draws a task, a length and a story. PATHS: a folder, a glob or a list with commas.

    stages: a curriculum, ({"from": document number, "lengths": ...}, ...): what changes from that document on, and
    stays changed; also tasks, more_questions, apart and stories.
    """

    tasks: tuple[str, ...] = TASKS[:5]
    lengths: tuple[int, ...] = (0,)  # GPT-2-equivalent tokens
    stages: tuple[dict[str, Any], ...] = ()
    facts: str = SIMULATOR  # or PATHS of bAbI files, all of which are used: name the training files
    background: str = BUILTIN  # or PATHS of text files
    more_questions: float = 0.0  # further questions after a sentence, on average
    # Lines before one is asked again with the same answer. Repeated, they are answered by copying: the way in for tasks
    # of many sentences, which are not learned without; and a way out for qa4, of whose few questions most would be.
    apart: int = 0
    confusing: float = 0.0  # share of the background's sentences with people and things of the stories in them
    # Told one after another in each document: for tasks of few sentences (qa4), which would leave most of a row empty.
    # People who still carry things when the next story begins would make no sense: not for qa2, qa3, qa5.
    stories: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", _listed("tasks", self.tasks, "[qa1, qa2]"))
        for task in self.tasks:
            check_choice("task", task, TASKS)
        object.__setattr__(self, "lengths", _checked_lengths("lengths", self.lengths))
        for name in ("facts", "background"):
            check_text(name, getattr(self, name))
        _check_number("more_questions", self.more_questions)
        _check_number("confusing", self.confusing, most=1)
        check_whole("apart", self.apart, least=0)
        check_whole("stories", self.stories, least=1)
        check_whole("seed", self.seed, least=0)
        object.__setattr__(self, "stages", _checked_stages(self.stages))
        if self.stages:
            list(self.over_time())  # each is checked as it is made

    def over_time(self) -> Iterator[tuple[int, TrainingConfig]]:
        """From which document on what holds."""
        config = dataclasses.replace(self, stages=())
        yield 0, config
        for stage in self.stages:
            changes = {name: value for name, value in stage.items() if name != BEGIN}
            config = dataclasses.replace(config, **changes)
            yield stage[BEGIN], config

    def at(self, number: int) -> TrainingConfig:
        return [config for begin, config in self.over_time() if begin <= number][-1]


def _listed(name: str, value: Any, example: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name}={value!r} must be a list of one or more, such as {example}.")
    return tuple(value)


def _checked_lengths(name: str, lengths: Any) -> tuple[int, ...]:
    for length in _listed(name, lengths, "[0, 4000]"):
        check_whole(f"length in {name}", length, least=0)
    return tuple(lengths)


def _checked_stages(stages: Any) -> tuple[dict[str, Any], ...]:
    accepted = f"stages={stages!r} must be a list such as [{{{BEGIN}: 1000, lengths: [0, 4000]}}], with rising numbers."
    if not isinstance(stages, list | tuple) or not all(isinstance(stage, dict) and BEGIN in stage for stage in stages):
        raise ValueError(accepted)
    for stage in stages:
        check_whole(f"{BEGIN} in stages", stage[BEGIN], least=0)
        for name in stage:
            check_choice("option of a stage", name, (BEGIN, *STAGED))
    begins = [stage[BEGIN] for stage in stages]
    if begins != sorted(set(begins)):
        raise ValueError(accepted)
    return tuple(stages)


def _check_number(name: str, value: Any, most: float = sys.float_info.max) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        upper = f" and at most {most}" if most < sys.float_info.max else ""
        raise ValueError(f"{name}={value!r} must be a number of at least 0{upper}.")


class Babilong:
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
        """Equal for equal documents: of files what is in them, not where they lie."""
        facts, background = facts_digest(self.config.facts), background_digest(self.config.background)
        return f"{dataclasses.replace(self.config, facts=facts, background=background)!r} {self.split}"

    def lines(self, number: int) -> Iterator[Line]:
        """Document n is a function of the options, the split and n."""
        seed = f"{self.split} {self.config.seed} {number}"
        draw = random.Random(f"document {seed}")
        stage = self.config.at(number)
        task, length = draw.choice(stage.tasks), draw.choice(stage.lengths)
        story = told_on(self._stories[task](draw) for _ in range(stage.stories))
        return document_lines(story, length, self._background, seed, stage.more_questions, stage.apart)

    def text(self, number: int) -> str:
        return "".join(line.text + line.answer for line in self.lines(number))

    def lessons(self, tokenizer: PreTrainedTokenizerBase) -> BabilongLessons:
        return BabilongLessons(self, Encoder(tokenizer))


class BabilongLessons:
    """Documents as tokens, with loss on the answers alone."""

    count: int | None = None

    def __init__(self, exercise: Babilong, encoder: Encoder) -> None:
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


def _simulated(task: str, draw: random.Random) -> Story:
    return simulate(task, f"training {draw.getrandbits(64)}")


def _drawn(stories: list[Story], draw: random.Random) -> Story:
    return draw.choice(stories)
