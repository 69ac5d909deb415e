"""Samples of BABILong: placement, length, determinism, and a text that nobody holds."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from atlas_memory.tasks.babilong.facts import TASKS
from atlas_memory.tasks.babilong.solver import Solver
from atlas_memory.tasks.babilong.stream import Facts, cells, scattered
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
    """Each in a gap of its own, drawn evenly, the first and the last too; several may fall into one."""
    sentences, facts, samples = 20, 5, 400
    drawn = [scattered(facts, str(number))(sentences) for number in range(samples)]
    assert all(gaps == sorted(gaps) for gaps in drawn)
    counts = Counter(gap for gaps in drawn for gap in gaps)
    assert set(counts) == set(range(sentences + 1))
    expected = samples * facts / (sentences + 1)
    assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())
    # As many different gaps as of independent draws: 4.54 of 5.
    apart = sum(len(set(gaps)) for gaps in drawn) / samples
    assert abs(apart - (sentences + 1) * (1 - (sentences / (sentences + 1)) ** facts)) < 0.15


def test_facts_are_told_in_their_gaps() -> None:
    sample, question = Facts("qa1").sample(3, 1000, BACKGROUND), Facts("qa1").question(3)
    pieces = [piece.strip() for piece in sample.pieces()][:-1]
    told = [place for place, piece in enumerate(pieces) if piece in question.sentences]
    gaps = scattered(len(told), "gaps qa1 1000 0 3")(len(pieces) - len(told))
    assert told == [gap + before for before, gap in enumerate(gaps)]


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
