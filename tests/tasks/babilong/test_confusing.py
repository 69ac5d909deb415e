"""Backgrounds with words of the stories."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from atlas_memory.tasks.babilong.confusing import Confusing, replaced
from atlas_memory.tasks.babilong.training import Babilong


class Repeating:
    def __init__(self, sentence: str) -> None:
        self.sentence = sentence

    def sentences(self, seed: str) -> Iterator[str]:
        return itertools.repeat(self.sentence)


SENTENCE = "Then, to her horror, Harriet saw the coachman and a stranger; she turned to the wall."


def made(share: float, seed: str = "0", number: int = 2000) -> list[str]:
    return list(itertools.islice(Confusing(Repeating(SENTENCE), share).sentences(seed), number))


def test_the_share_is_changed_and_the_rest_is_not() -> None:
    assert set(made(0.0)) == {SENTENCE}
    unchanged = made(0.3).count(SENTENCE) / 2000
    # of those that may be changed, one in 2⁵ is not: five words, each with even chances
    assert unchanged == pytest.approx(1 - 0.3 * (1 - 2**-5), abs=0.03)
    assert made(0.3) == made(0.3) != made(0.3, seed="1")


def test_people_stand_for_people_and_things_for_things() -> None:
    others = {tuple(zip(SENTENCE.split(), sentence.split(), strict=True)) for sentence in made(1.0)}
    changes = {(before, after.rstrip(";.")) for pairs in others for before, after in pairs if before != after}
    assert {before for before, _ in changes} == {"Harriet", "coachman", "stranger;", "she", "wall."}
    people = {after for before, after in changes if before in ("Harriet", "she")}
    things = {after for before, after in changes if before not in ("Harriet", "she")}
    assert {"John", "Mary", "Bill"} <= people and {"milk", "garden", "school"} <= things and not people & things


@pytest.mark.parametrize("sentence", ["She went to the window.", "He took the hat.", "He dropped the letter there."])
def test_no_fact_is_made(sentence: str) -> None:
    seen = {replaced(sentence, random.Random(seed)) for seed in range(500)}
    subjects = {text.split()[0] for text in seen}
    assert "Mary" in subjects and len(seen) > 10  # `Mary went to the window.` and `She went to the garden.`
    words = {word.strip(".") for text in seen if text.split()[0] not in ("He", "She") for word in text.split()[1:]}
    assert not words & {"garden", "milk", "kitchen"}


def test_an_option_of_the_exercise() -> None:
    plain, confusing = (Babilong({"lengths": [500], "confusing": share}).text(0) for share in (0.0, 0.9))
    assert plain != confusing
    for bad in (-0.1, 1.5, "half", True):
        with pytest.raises(ValueError, match="confusing"):
            Babilong({"confusing": bad})
