"""The file of scores."""

from __future__ import annotations

import json
from pathlib import Path

from atlas_memory.files import write_json
from atlas_memory.tasks.paper import Report, Score


def make_report(value: float) -> Report:
    score = Score("swde", "recall", "contains", value, None, True, 2, "1")
    return Report("model", "recall", None, None, [score], [], {})


def test_a_number_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    write_json(tmp_path / "scores.json", make_report(float("nan")).to_dict())
    content = json.loads((tmp_path / "scores.json").read_text())
    assert content["scores"][0]["value"] is None
    assert content["averages"] == {"recall": None}
