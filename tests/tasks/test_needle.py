"""Needles: where they are, what they say, how they are scored."""

from __future__ import annotations

import re
import uuid

import pytest

from atlas_memory.tasks.background import open_background
from atlas_memory.tasks.lengths import characters_of
from atlas_memory.tasks.needle import DEPTHS, NOISE, TASKS, cells, needle_sample

BACKGROUND = open_background("builtin")
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for ([\w-]+) is: ([\w-]+)\.")


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("task", TASKS)
def test_one_needle_at_its_depth(task: str, depth: float) -> None:
    sample = needle_sample(task, 3, 1500, depth, BACKGROUND)
    pieces = [piece.strip() for piece in sample.pieces()]
    (place,) = [number for number, piece in enumerate(pieces) if NEEDLE.fullmatch(piece)]
    assert (place - 1) / (len(pieces) - 3) == pytest.approx(depth, abs=0.51 / (len(pieces) - 3))
    found = NEEDLE.fullmatch(pieces[place])
    assert found is not None and found[3] == sample.answer and found[2] in pieces[-1]
    assert characters_of(1500) - 200 < len("".join(sample.pieces())) <= characters_of(1500)
    assert sample.score(f" {sample.answer}.", sample.answer) and not sample.score(" 1", sample.answer)


def test_values_and_haystacks() -> None:
    assert re.fullmatch(r"[1-9]\d{6}", needle_sample("single_2", 0, 500, 0.5).answer)
    assert uuid.UUID(needle_sample("single_3", 0, 500, 0.5).answer).version == 4
    noise = [piece.strip() for piece in needle_sample("single_1", 0, 800, 0.5, BACKGROUND).pieces()]
    assert sum(piece in NOISE for piece in noise) == len(noise) - 3


def test_a_grid_the_same_for_every_model() -> None:
    one, other = cells([500, 900], 2, seed=1), cells([500, 900], 2, seed=1)
    assert len(one) == 3 * 2 * 5
    assert {(cell.task, cell.length, cell.details["depth"]) for cell in one} == {
        (task, length, depth) for task in TASKS for length in (500, 900) for depth in DEPTHS
    }
    for mine, theirs in zip(one, other, strict=True):
        assert mine.sample is not None and theirs.sample is not None
        assert list(mine.sample(1).pieces()) == list(theirs.sample(1).pieces())
    with pytest.raises(ValueError, match=r"depth=1\.5 must lie between 0"):
        needle_sample("single_1", 0, 500, 1.5)
    with pytest.raises(ValueError, match="task='single_4' is not a choice"):
        needle_sample("single_4", 0, 500, 0.5)
