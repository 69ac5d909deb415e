"""An evaluation in parts, put together, is the evaluation in one."""

from __future__ import annotations

import dataclasses
import json
import re
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
    assert set(whole["settings"]) - set(merged["settings"]) == {"samples", "first", "tasks", "lengths"}
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
        (
            [part(0, 1, 5), dataclasses.replace(part(5, 1, 5), model="other")],
            "model='model' in one and 'other' in another",
        ),
        ([part(0, 1, 5, length=0), part(0, 1, 5, seed=1), part(5, 1, 5)], "seed=0 in one and 1 in another"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(parts)


def test_contents_count_and_names_do_not() -> None:
    mine = part(0, 1, 5, model_digest="x", facts="here", facts_digest="f")
    moved = dataclasses.replace(part(5, 1, 5, model_digest="x", facts="there", facts_digest="f"), model="elsewhere")
    merged = merge([mine, moved])
    assert (merged.model, merged.settings) == ("model", mine.settings) and merged.results[0].samples == 10
    for settings, message in (
        (
            {"model_digest": "y", "facts_digest": "f"},
            "model='model' in one and 'model' in another differ in what is in",
        ),
        ({"model_digest": "x", "facts_digest": "g"}, "facts='here' in one and 'here' in another differ in what is in"),
    ):
        with pytest.raises(ValueError, match=message):
            merge([mine, part(5, 1, 5, facts="here", **settings)])


def test_reports_without_digests_are_compared_by_name() -> None:
    old, new, other = part(0, 1, 5), part(5, 1, 5, model_digest="x"), part(10, 1, 5, model_digest="y")
    assert merge([old, new]).settings == merge([new, old]).settings == {"seed": 0}
    with pytest.raises(ValueError, match="model='model' in one and 'other' in another are not the same"):
        merge([old, dataclasses.replace(new, model="other")])
    with pytest.raises(ValueError, match="differ in what is in their files"):
        merge([old, new, other])


def test_a_cell_has_one_precision() -> None:
    short, long = part(0, 1, 2, length=0, precision="float32"), part(0, 1, 5, precision="bfloat16")
    merged = merge([short, long])
    assert merged.settings["precision"] == {"qa1 at 0K": "float32", "qa1 at 4K": "bfloat16"}
    more = merge([merged, part(5, 1, 5, precision="bfloat16")])  # read back, and gone on with
    assert more.settings["precision"] == merged.settings["precision"] and more.results[1].samples == 10
    assert merge([long, part(5, 1, 5, precision="bfloat16")]).settings["precision"] == "bfloat16"
    for whole in (long, merged):
        with pytest.raises(ValueError, match="qa1 at 4K has precision='bfloat16' in one and 'float32' in another"):
            merge([whole, part(5, 1, 5, precision="float32")])


def test_what_was_chosen_stands_in_the_results() -> None:
    chosen = {"tasks": "qa1", "lengths": "4k", "samples": 5, "first": 0, "depths": "0", "step": 512}
    parts = [dataclasses.replace(part(5 * n, 1, 5), settings={**chosen, "batch": 8 + n}) for n in range(2)]
    assert merge(parts[:1]).settings == {"step": 512, "batch": 8}
    assert merge(parts).settings == {"step": 512}


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    whole = json.dumps(part(0, 1, 5).to_dict())
    damaged = [
        whole.replace('"settings": {', '"settings": null, "other": {'),
        whole.replace('"samples": 5', '"samples": "5"'),
        whole.replace('"samples": 5', '"samples": 4.5'),
        whole.replace('"task": "qa1"', '"task": null'),
        re.sub(r'"tokens_per_second": [^,]*', '"tokens_per_second": 0', whole),
        re.sub(r'"tokens_per_second": [^,]*', '"tokens_per_second": Infinity', whole),
        re.sub(r'"tokens": [^,]*', '"tokens": 0', whole),
        whole.replace('"results": [', '"results": [], "others": ['),
    ]
    assert all(text != whole for text in damaged)
    texts = ("nothing", "[]", '{"results": []}', '{"results": [{"task": "qa1"}]}', *damaged)
    for number, text in enumerate(texts):
        file, out = tmp_path / f"{number}.json", tmp_path / "out.json"
        file.write_text(text)
        done = CliRunner().invoke(app, ["eval", "merge", str(file), "--out", str(out)])
        assert done.exit_code == 2 and done.stderr.startswith(f"error: files: {file} has no results")
        assert not out.exists()
