"""Lessons: mixtures draw each lesson from a part by its share, the same one every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atlas_memory.data import DataConfig, ExerciseConfig, RowsConfig, SegmentRows, StoredLessons, make_loader
from atlas_memory.data.lessons import Cut, MixedLessons
from atlas_memory.data.options import SourceConfig
from tests.data.support import assert_same, make_store, take

SEGMENTS = RowsConfig(kind="segments", batch=3, length=5)


class Constant:
    """Lesson n: the same token n + 1 times, all of them asked for."""

    count: int | None = None

    def __init__(self, token: int) -> None:
        self.token, self.pad, self.digest = token, 0, str(token)

    def length(self, number: int) -> int:
        return number + 1

    def cut(self, number: int, begin: int, end: int) -> Cut:
        tokens = np.full(self.length(number), self.token)[begin:end]
        return Cut(tokens, tokens, tokens > self.token)


def test_stored_lessons_are_documents_with_every_token_a_target(tmp_path: Path) -> None:
    store = make_store(tmp_path, [4, 9, 2])
    lessons = StoredLessons(store, RowsConfig(kind="segments", shuffle=False))
    assert [lessons.length(number) for number in range(4)] == [4, 9, 2, 4]
    document = store.document(1)
    cut = lessons.cut(1, 5, 9)
    np.testing.assert_array_equal(cut.tokens, document[5:9])
    np.testing.assert_array_equal(cut.targets, [*document[6:9], -100])
    assert not cut.background.any()


def test_a_mixture_keeps_its_shares_and_repeats_itself() -> None:
    parts = [Constant(1), Constant(2)]
    drawn = [int(MixedLessons(parts, (0.8, 0.2), 7).cut(n, 0, 1).tokens[0]) for n in range(1000)]
    assert 740 < drawn.count(1) < 860  # four deviations
    again = MixedLessons(parts, (0.8, 0.2), 7)
    assert drawn == [int(again.cut(n, 0, 1).tokens[0]) for n in range(1000)]
    other = MixedLessons(parts, (0.8, 0.2), 8)
    assert drawn != [int(other.cut(n, 0, 1).tokens[0]) for n in range(1000)]
    assert len({again.digest, other.digest, MixedLessons(parts, (0.7, 0.3), 7).digest}) == 3


def test_rows_of_a_mixture_resume_exactly() -> None:
    rows = SegmentRows(MixedLessons([Constant(1), Constant(2)], (0.5, 0.5), 0), SEGMENTS)
    expected = take(rows, 30)
    resumed = SegmentRows(MixedLessons([Constant(1), Constant(2)], (0.5, 0.5), 0), SEGMENTS)
    for _ in range(11):
        resumed.advance()
    again = SegmentRows(MixedLessons([Constant(1), Constant(2)], (0.5, 0.5), 0), SEGMENTS)
    again.load_state_dict(resumed.state_dict())
    assert_same(take(again, 19), expected[11:])


def test_language_modelling_and_an_exercise_in_one_loader(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text.txt").write_text("every token of me is a target " * 3)
    config = DataConfig(
        source=SourceConfig("text", str(tmp_path / "texts")),
        exercises=(ExerciseConfig("babilong", 0.5, {"tasks": ["qa1"]}),),
        rows=RowsConfig(kind="segments", batch=8, length=64),
        validation=0.0,
        cache=str(tmp_path / "cache"),
    )
    batch = next(make_loader(config, progress=False))
    asked = (batch.targets != -100).float().mean(1)
    assert (asked > 0.9).any() and (asked < 0.5).any()


def test_shares_are_checked() -> None:
    half = ExerciseConfig("babilong", 0.5)
    assert DataConfig(exercises=(half, half), rows=SEGMENTS).source_share == 0
    with pytest.raises(ValueError, match=r"at most 1 together, got 1\.5"):
        DataConfig(exercises=(half, half, half), rows=SEGMENTS)
    with pytest.raises(ValueError, match=r"exercises need rows\.kind='segments'"):
        DataConfig(exercises=(half,))
    with pytest.raises(ValueError, match="share=0 must be a number above 0"):
        ExerciseConfig("babilong", 0)
