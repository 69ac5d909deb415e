"""Tables and figures of results."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atlas_memory.tasks import figures
from atlas_memory.tasks.results import Report, Result


def report(*details: dict[str, Any]) -> Report:
    results = [
        Result(task, length, 10, 0.5, 0.2, 0.8, 1e5, 300.0, length, length, row)
        for task in ("qa1", "qa2")
        for length in (0, 4000)
        for row in details or ({},)
    ]
    return Report("babilong", "folder/model", {}, results)


def test_the_table_has_means_and_fits_a_terminal() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report().table())
    text = console.export_text()
    assert "…" not in text and text.count("mean") == 2 and "50.0%" in text and "4K" in text


@pytest.mark.parametrize("kind", ["curves", "heat maps", "bars"])
def test_figures(tmp_path: Path, kind: str) -> None:
    made = report({"depth": 0.0}, {"depth": 1.0}) if kind == "heat maps" else report()
    if kind == "bars":
        made = Report("mad", "model", {}, made.results[:1])
    figures.draw(made, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
