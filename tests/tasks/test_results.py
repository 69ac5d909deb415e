"""Tables and figures of results."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from atlas_memory.tasks import figures
from atlas_memory.tasks.results import Mean, Report, Result, mean, peak_rss_mb, wilson


def report(*details: dict[str, Any]) -> Report:
    results = [
        Result(task, length, 10, accuracy, accuracy / 2, 1.0, 1e5, 300.0, length, length, row)
        for task, accuracies in (("qa1", (0.2, 0.4)), ("qa2", (0.8, 0.7)))
        for length, accuracy in zip((0, 4000), accuracies, strict=True)
        for row in details or ({},)
    ]
    return Report("babilong", "folder/model", {}, results)


def test_the_table_has_means_and_fits_a_terminal() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report().table())
    text = console.export_text()
    assert "…" not in text and text.count("mean") == 2 and "55.0%" in text and "4K" in text


@pytest.mark.parametrize(
    ("task", "length", "details"), [("single_3", 10**7, {"depth": 0.25}), ("in_context_recall", 128, {})]
)
def test_every_row_says_of_which_task_it_is_and_how_sure(task: str, length: int, details: dict[str, Any]) -> None:
    result = Result(task, length, 1000, 1.0, 0.9962, 1.0, 123_456.0, 1234.5, length, length, details)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Report("niah", "folder/model", {}, [result]).table())
    text = console.export_text()
    assert f" {task} " in text and "…" not in text
    assert "99.6–100.0 " in text and f"{length:,}" in text and "1,234 MB" in text


@pytest.mark.parametrize("details", [{}, {"depth": 0.5}, {"depth": 0.5, "pairs": 4}])
def test_means_stand_below_what_they_are_of(details: dict[str, Any]) -> None:
    columns = {str(column.header): list(column.cells) for column in report(details).table().columns}
    assert columns["task"][-2:] == ["mean", "mean"] and columns["length"][-2:] == ["0K", "4K"]
    assert columns["accuracy"] == ["20.0%", "40.0%", "80.0%", "70.0%", "50.0%", "55.0%"]
    assert all(columns[name][-2:] == ["", ""] for name in (*details, "samples"))
    low, high = wilson(10, 20)  # ten answers of each of two tasks
    assert columns["low–high"][-2] == f"{100 * low:.1f}–{100 * high:.1f}"


def test_a_task_at_several_depths_has_a_mean_of_its_own_at_each_length() -> None:
    columns = {str(c.header): list(c.cells) for c in report({"depth": 0.0}, {"depth": 1.0}).table().columns}
    assert columns["task"][-4:] == ["qa1", "qa1", "qa2", "qa2"] and columns["depth"][-4:] == ["all"] * 4
    assert columns["length"][-4:] == ["0K", "4K", "0K", "4K"]
    assert columns["accuracy"][-4:] == ["20.0%", "40.0%", "80.0%", "70.0%"] and len(columns["task"]) == 12


def test_a_mean_is_as_uncertain_as_its_smallest_samples() -> None:
    def of(*samples: int) -> Mean:
        return mean([Result("qa1", 0, n, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0) for n in samples])

    assert of(10, 10)[1:] == pytest.approx(wilson(10, 20))
    many, mixed, few = (one.high - one.low for one in (of(40, 40), of(40, 10), of(10, 10)))
    assert many < mixed < few and mixed > wilson(10, 40)[1] - wilson(10, 40)[0]


def test_means_of_other_tasks_are_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, _: kept.append(figure))
    some = Report("babilong", "model", {}, [r for r in report().results if (r.task, r.length) != ("qa2", 4000)])
    figures.compare({"whole": report(), "some": some}, tmp_path / "figure.png")
    lines = {line.get_label(): list(line.get_xdata()) for line in kept[0].axes[0].get_lines()}
    assert lines == {"whole": [0, 1], "some": [0]}


def test_bars_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, _: kept.append(figure))
    made = [Result("mqar", 64, 10, 0.5, 0.4, 0.6, 1.0, 1.0, 1.0, 1.0, {"pairs": pairs}) for pairs in (4, 8)]
    figures.draw(Report("mqar", "model", {}, made), tmp_path / "figure.png")
    assert [label.get_text() for label in kept[0].axes[0].get_xticklabels()] == ["mqar 4 pairs", "mqar 8 pairs"]


def test_a_title_is_no_markup() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Report("babilong", "runs/[bold]/model[/x]", {}, report().results).table())
    assert "babilong: runs/[bold]/model[/x]" in console.export_text()


def test_the_most_memory_without_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    assert 10 < peak_rss_mb() < 1e6
    memory = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=3 * 2**20))
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=lambda: memory))
    assert peak_rss_mb() == 3.0


@pytest.mark.parametrize("kind", ["curves", "heat maps", "bars"])
def test_figures(tmp_path: Path, kind: str) -> None:
    made = report({"depth": 0.0}, {"depth": 1.0}) if kind == "heat maps" else report()
    if kind == "bars":
        made = Report("mad", "model", {}, made.results[:1])
    figures.draw(made, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
