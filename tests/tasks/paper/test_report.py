"""The file: the old one or the new one, never a part."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from atlas_memory.tasks.paper import EvaluationError, Report, Score, check_output, write_json


def make_report(value: float) -> Report:
    score = Score("swde", "recall", "contains", value, None, True, 2, "1")
    return Report("model", "recall", None, None, [score], [], {})


def test_a_number_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    write_json(tmp_path / "scores.json", make_report(float("nan")).to_dict())
    content = json.loads((tmp_path / "scores.json").read_text())
    assert content["scores"][0]["value"] is None
    assert content["averages"] == {"recall": None}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scores.json"
    write_json(path, {"run": 1})

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_json(path, {"run": 2})
    assert json.loads(path.read_text()) == {"run": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_where_a_file_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"is a folder\. It should be the file to write"):
        check_output(tmp_path)
    with pytest.raises(EvaluationError, match=r"the folder '.*absent' does not exist"):
        check_output(tmp_path / "absent" / "scores.json")
