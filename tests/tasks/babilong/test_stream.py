"""Samples of BABILong: placement, length, determinism, and a text that nobody holds."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from atlas_memory.tasks.babilong.facts import TASKS
from atlas_memory.tasks.babilong.solver import Solver
from atlas_memory.tasks.babilong.stream import Facts, cells
from atlas_memory.tasks.background import LONGEST, open_background
from atlas_memory.tasks.lengths import characters_of

BACKGROUND = open_background("builtin")


@pytest.mark.parametrize("task", TASKS)
def test_facts_keep_their_order_and_answer_the_question(task: str) -> None:
    facts = Facts(task, seed=1)
    for number in range(4):
        sample, question = facts.sample(number, 2000, BACKGROUND), facts.question(number)
        pieces = [piece.strip() for piece in sample.pieces()]
        assert pieces[-1] == question.question
        assert [piece for piece in pieces[:-1] if piece in question.sentences] == list(question.sentences)
        assert Solver(question.sentences).answer(question.question).text == sample.answer


@pytest.mark.parametrize("length", [1000, 8000])
def test_the_length_is_right_within_a_sentence(length: int) -> None:
    text = "".join(Facts("qa1").sample(0, length, BACKGROUND).pieces())
    assert characters_of(length) - 200 < len(text) <= characters_of(length)


def test_without_room_there_are_only_facts() -> None:
    sample, question = Facts("qa3").sample(5, 0, BACKGROUND), Facts("qa3").question(5)
    assert "".join(sample.pieces()) == " ".join([*question.sentences, question.question])


def test_facts_fall_anywhere() -> None:
    """Their mean place over many samples is the middle of the text."""
    places = []
    for number in range(40):
        sample, question = Facts("qa1").sample(number, 1000, BACKGROUND), Facts("qa1").question(number)
        pieces = [piece.strip() for piece in sample.pieces()][:-1]
        places += [place / len(pieces) for place, piece in enumerate(pieces) if piece in question.sentences]
    assert 0.4 < sum(places) / len(places) < 0.6


def test_the_same_for_every_model_and_facts_for_every_length() -> None:
    one, other = Facts("qa2", seed=4), Facts("qa2", seed=4)
    assert list(one.sample(7, 500, BACKGROUND).pieces()) == list(other.sample(7, 500, BACKGROUND).pieces())
    assert one.sample(7, 500, BACKGROUND).answer == one.sample(7, 5000, BACKGROUND).answer
    assert Facts("qa2", seed=5).question(7) != one.question(7)


def test_samples_of_files(tmp_path: Path) -> None:
    (tmp_path / "qa1_valid.txt").write_text("1 Mary moved to the office.\n2 Where is Mary?\toffice\t1\n")
    (cell,) = cells([0], 1, tasks=["qa1"], facts=str(tmp_path))
    assert cell.sample is not None and "".join(cell.sample(0).pieces()) == "Mary moved to the office. Where is Mary?"
    with pytest.raises(ValueError, match=r"samples=2, first=0: .* has 1 questions of qa1; accepted"):
        cells([0], 2, tasks=["qa1"], facts=str(tmp_path))
    with pytest.raises(ValueError, match=r"samples=1, first=1: .* has 1 questions of qa1; accepted"):
        cells([0], 1, tasks=["qa1"], facts=str(tmp_path), first=1)
    with pytest.raises(ValueError, match="first=-1 must be a whole number of at least 0"):
        cells([0], 1, first=-1)
    with pytest.raises(ValueError, match="background='absent'"):
        cells([0], 1, background="absent")


def test_a_million_tokens_are_never_held(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    sentences = BACKGROUND.sentences("book")
    book.write_text("\n".join(next(sentences) for _ in range(3000)))
    sample = Facts("qa1").sample(0, 1_000_000, open_background(str(book)))
    tracemalloc.start()
    try:
        characters = sum(len(piece) for piece in sample.pieces())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert characters_of(1_000_000) - LONGEST < characters <= characters_of(1_000_000)
    assert peak < 2_000_000  # of 4.2 million characters
