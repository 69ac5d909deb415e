"""bAbI stories: numbered sentences and questions, as in the public files.

    1 Mary moved to the bathroom.
    2 John went to the hallway.
    3 Where is Mary? 	bathroom	1

A question line has the answer and the numbers of the lines that support it after tabs; number 1 starts a new story.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from atlas_memory.files import digest_of
from atlas_memory.tasks.files import find_files

SIMULATOR = "simulator"  # stories made here, instead of files
TASKS = tuple(f"qa{number}" for number in range(1, 11))


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of a story; all sentences before it are known when it is asked."""

    text: str
    answer: str
    supports: tuple[int, ...]  # places of the supporting sentences in the story's list of sentences
    asked_after: int  # sentences before it

    def later(self, sentences: int) -> Question:
        """The same question in a story that has so many sentences more before."""
        supports = tuple(place + sentences for place in self.supports)
        return dataclasses.replace(self, supports=supports, asked_after=self.asked_after + sentences)


@dataclasses.dataclass(frozen=True)
class Story:
    sentences: tuple[str, ...]
    questions: tuple[Question, ...]

    def lines(self) -> Iterator[tuple[str, Question | None]]:
        """Sentences and questions in the order they are told: (text, the question or None)."""
        told = 0
        for question in self.questions:
            yield from ((sentence, None) for sentence in self.sentences[told : question.asked_after])
            told = question.asked_after
            yield question.text, question


def told_on(stories: Iterable[Story]) -> Story:
    """Stories one after another as one: what is told later holds."""
    sentences: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    for story in stories:
        questions += tuple(question.later(len(sentences)) for question in story.questions)
        sentences += story.sentences
    return Story(sentences, questions)


class Asked(NamedTuple):
    """One question with the sentences before it: what BABILong hides."""

    sentences: tuple[str, ...]
    question: str
    answer: str


def asked(stories: Iterable[Story]) -> Iterator[Asked]:
    """Every question of every story, each with all sentences that precede it."""
    for story in stories:
        for question in story.questions:
            yield Asked(story.sentences[: question.asked_after], question.text, question.answer)


def read_stories(path: str | Path) -> list[Story]:
    """The stories of one file."""
    stories: list[_Reading] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place, separator, rest = line.partition(" ")
        if not separator or not place.isdecimal() or (not stories and place != "1"):
            raise ValueError(
                f"{path}, line {number}: {line.strip()[:60]!r} is not a bAbI line: `ID text`, from ID 1 on."
            )
        if place == "1":
            stories.append(_Reading())
        stories[-1].add(int(place), rest, f"{path}, line {number}")
    if not stories:
        raise ValueError(f"{path} has no stories; accepted: lines `ID text`, ID 1 starting a story.")
    return [reading.story() for reading in stories]


class _Reading:
    """A story under construction: line numbers become places of sentences."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.questions: list[Question] = []
        self._places: dict[int, int] = {}
        self._last = 0

    def add(self, number: int, text: str, where: str) -> None:
        if number != self._last + 1:
            raise ValueError(f"{where}: ID {number} follows ID {self._last}; accepted: the next number, or 1.")
        self._last = number
        if "\t" not in text:
            self._places[number] = len(self.sentences)
            self.sentences.append(text.strip())
            return
        fields = [field.strip() for field in text.split("\t")]
        if not fields[0] or not fields[1]:
            raise ValueError(f"{where}: {text!r} lacks a question or its answer.")
        try:
            supports = tuple(self._places[int(support)] for support in (fields[2].split() if fields[2:] else ()))
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{where}: supporting lines {fields[2]!r} must be numbers of sentences before it."
            ) from error
        self.questions.append(Question(fields[0], fields[1], supports, len(self.sentences)))

    def story(self) -> Story:
        return Story(tuple(self.sentences), tuple(self.questions))


def story_files(paths: str, task: str) -> list[Path]:
    """All files of a task in a folder, a glob or a comma-separated list: `qa1_valid.txt`, `qa1.txt`, …"""
    files = _of_task(paths, task)
    if not files:
        raise ValueError(
            f"facts={paths!r} has no file of {task}; accepted: names such as {task}_valid.txt or {task}.txt."
        )
    return files


def _of_task(paths: str, task: str) -> list[Path]:
    named = re.compile(rf"{task}(?:[^0-9].*)?\.txt")
    return [path for path in find_files("facts", paths, (".txt",)) if named.fullmatch(path.name)]


def measuring_files(paths: str, task: str) -> list[Path]:
    """Those for measuring: of a folder, also of one in a list, training files are left out if there are others.

    Files and globs are taken as they are named.
    """
    files = story_files(paths, task)
    parts = [part.strip() for part in paths.split(",")]
    folders, named = ([part for part in parts if Path(part).is_dir() is folder] for folder in (True, False))
    kept = {file for part in named for file in _of_task(part, task)}
    kept |= {file for part in folders for file in _of_task(part, task) if "train" not in file.stem}
    return [file for file in files if file in kept] or files


def facts_digest(paths: str) -> str:
    """Equal for equal facts: of files what is in them, not where they lie."""
    return paths if paths == SIMULATOR else digest_of(find_files("facts", paths, (".txt",)))
