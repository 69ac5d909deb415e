"""Tables and figures of MQAR and MAD."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from atlas_memory.studies import token_results
from atlas_memory.studies.language_models import FIGURE
from atlas_memory.studies.token_results import MQAR, Measured, figure, markdown


def entry(
    model: str, task: str, width: int, accuracy: float, seed: int = 0, size: int = 1000, diverged: bool = False
) -> Measured:
    return Measured(model, task, width, seed, accuracy, size * width, 5000, diverged)


def test_tables() -> None:
    sizes = markdown([entry("a", MQAR, 8, 0.25), entry("a", MQAR, 16, 0.5), entry("b", MQAR, 8, 1.0)])
    assert "| `a` | 25.0 % (8.0 kB) | 50.0 % (16.0 kB) | 37.5 % |" in sizes
    assert "| `b` | 100.0 % (8.0 kB) | – | – |" in sizes  # a mean of other columns would be no comparison
    tasks = markdown([entry("a", "memorization", 16, 0.25), entry("a", "compression", 16, 0.75)])
    assert "| `a` | 25.0 % | 75.0 % | 50.0 % |" in tasks
    one, other = entry("a", "memorization", 16, 0.5), entry("a", "memorization", 16, 0.0, seed=1, diverged=True)
    assert "| `a` | 25.0 % (1 diverged) | 25.0 % |" in markdown([one, other])
    assert "| `a` | diverged | 0.0 % |" in markdown([other])


def drawn(found: list[Measured], path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The axes of the figure."""
    made: list[Any] = []
    kind = token_results.figure_class()

    def make(**options: object) -> Any:
        made.append(kind(**options))
        return made[-1]

    monkeypatch.setattr(token_results, "figure_class", lambda: make)
    figure(found, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return made[0].axes[0]


@pytest.mark.parametrize("models", [1, 2, 9, 12])
def test_bars_stand_around_the_name_of_their_task(models: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ("memorization", "compression")
    found = [entry(f"model {n}", task, 16, 0.5) for n in range(models) for task in tasks]
    bars = drawn(found, tmp_path / FIGURE, monkeypatch).patches
    for place in range(len(tasks)):
        edges = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars[place :: len(tasks)]]
        assert statistics.mean(sum(pair) / 2 for pair in edges) == pytest.approx(place)
        assert max(right for _, right in edges) - min(left for left, _ in edges) < 1  # apart from the next task's


def test_what_was_not_measured_has_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [entry("a", "memorization", 16, 0.5), entry("a", "compression", 16, 0.0), entry("b", "memorization", 16, 1)]
    heights = [bar.get_height() for bar in drawn(found, tmp_path / FIGURE, monkeypatch).patches]
    assert heights[:3] == [0.5, 0.0, 1.0] and math.isnan(heights[3])


def test_a_line_goes_through_the_means_over_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [entry("a", MQAR, width, 0.1 * width * (seed + 1), seed) for seed in range(2) for width in (4, 2)]
    (line,) = drawn(found, tmp_path / FIGURE, monkeypatch).lines
    assert [tuple(point) for point in line.get_xydata()] == [(2000, pytest.approx(0.3)), (4000, pytest.approx(0.6))]
