"""Learning rates and penalties, by the number of the step alone."""

from __future__ import annotations

from typing import Any

import pytest

from atlas_memory.train.recipe import LoopConfig, ScheduleConfig
from atlas_memory.train.schedule import Penalties, factor, penalties


def rates(steps: int, **fields: Any) -> list[float]:
    return [factor(ScheduleConfig(**fields), step, steps) for step in range(steps)]


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_warm_up_rises_to_one(name: str, warmup: int) -> None:
    found = rates(20, name=name, warmup=warmup)
    assert found[:warmup] == [(step + 1) / 4 for step in range(warmup)]
    assert found[warmup] == 1


def test_cosine_falls_to_the_final_share() -> None:
    found = rates(11, name="cosine", warmup=0, final=0.2)
    assert found == sorted(found, reverse=True)
    assert found[5] == pytest.approx(0.6)
    assert found[-1] == pytest.approx(0.2)


def test_wsd_is_stable_and_then_falls() -> None:
    found = rates(100, name="wsd", warmup=10, decay=0.25, final=0.0)
    assert found[9:74] == [1.0] * 65
    assert found[75:] == sorted(found[75:], reverse=True)
    assert found[87] == pytest.approx(0.48, abs=0.02)
    assert found[-1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_runs_shorter_than_their_warm_up(name: str, steps: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(steps, name=name, warmup=2))


def test_penalties_begin_and_grow() -> None:
    config = LoopConfig(steps=8, write_penalty=6.0, leak_penalty=60.0, write_penalty_from=2, write_penalty_ramp=3)
    assert [penalties(config, step).write for step in range(8)] == [0, 0, 2, 4, 6, 6, 6, 6]
    assert [penalties(config, step).leak for step in range(8)] == [0, 0, 20, 40, 60, 60, 60, 60]


def test_penalties_are_whole_at_once_unless_told_otherwise() -> None:
    assert penalties(LoopConfig(steps=8, write_penalty=6.0), 0) == Penalties(6, 0)
