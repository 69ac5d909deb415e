"""An evaluation in parts, put together, is the evaluation in one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.tasks.merging import merge
from atlas_memory.tasks.results import Report, Result, wilson
from tests.tasks.conftest import without_times


def part(first: int, right: int, samples: int, length: int = 4000, **settings: Any) -> Report:
    low, high = wilson(right, samples)
    result = Result("qa1", length, samples, right / samples, low, high, 100.0, 300.0 + first, 10.0, 20.0 + first)
    return Report("babilong", "model", {"seed": 0, **settings}, [dataclasses.replace(result, first=first)])


def evaluated(*arguments: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert done.exit_code == 0, done.stderr
    content: dict[str, Any] = json.loads(Path(arguments[-1]).read_text())
    return content


def test_parts_are_the_whole(byte_model: Path, tmp_path: Path) -> None:
    """Through the command: five samples at once, and two and three of them in any order."""
    common = ("babilong", "--model", byte_model, "--lengths", "0k,300", "--tasks", "qa1,qa4")
    whole = evaluated(*common, "--samples", "5", "--out", tmp_path / "whole.json")
    evaluated(*common, "--first", "2", "--samples", "3", "--out", tmp_path / "late.json")
    evaluated(*common, "--samples", "2", "--out", tmp_path / "early.json")
    merged = evaluated("merge", tmp_path / "late.json", tmp_path / "early.json", "--out", tmp_path / "merged.json")
    assert (tmp_path / "merged.png").is_file()
    assert set(whole["settings"]) - set(merged["settings"]) == {"samples", "first"}
    for mine, theirs in zip(without_times(merged)["results"], without_times(whole)["results"], strict=True):
        assert mine == pytest.approx(theirs)


def test_the_numbers() -> None:
    merged = merge([part(10, 3, 5), part(0, 9, 10), part(0, 1, 2, length=0)])
    short, long = merged.results
    assert (short.length, short.samples, short.accuracy) == (0, 2, 0.5)
    assert (long.first, long.samples, long.accuracy) == (0, 15, 12 / 15)
    assert (long.low, long.high) == wilson(12, 15)
    assert long.tokens == pytest.approx((10 * 20 + 5 * 30) / 15) and long.peak_rss_mb == 310
    assert long.tokens_per_second == pytest.approx(100)


def test_what_does_not_belong_together() -> None:
    for parts, message in (
        ([], "nothing to merge"),
        ([part(0, 1, 5), part(4, 1, 5)], "samples 4 to 4 twice of qa1 at 4K"),
        ([part(0, 1, 5), part(6, 1, 5)], "no sample 5 of qa1 at 4K"),
        ([part(0, 1, 5), part(5, 1, 5, facts="simulator")], "facts=None in one and 'simulator' in another"),
        ([part(0, 1, 5), part(5, 1, 5, seed=1)], "seed=0 in one and 1 in another"),
        ([part(0, 1, 5), dataclasses.replace(part(5, 1, 5), model="other")], "model='other' are not parts of one"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(parts)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    for number, text in enumerate(("nothing", "[]", '{"results": []}', '{"results": [{"task": "qa1"}]}')):
        file, out = tmp_path / f"{number}.json", tmp_path / "out.json"
        file.write_text(text)
        done = CliRunner().invoke(app, ["eval", "merge", str(file), "--out", str(out)])
        assert done.exit_code == 2 and done.stderr.startswith(f"error: files: {file} has no results")
        assert not out.exists()
