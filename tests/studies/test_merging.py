"""Studies made in several sittings: every run once, and only those of one study."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.studies import long_texts, token_tasks
from atlas_memory.studies.language_models import FIGURE, RESULTS, TABLE
from atlas_memory.studies.merging import merge
from atlas_memory.studies.token_results import MQAR, Measured
from atlas_memory.tasks.results import Report, Result

STUDY = long_texts.Study(models=("titans",), tasks=("qa1",), lengths=(0,), samples=4)


def report(right: int, facts: str = "one", **more: Any) -> Report:
    settings = {"facts": "a.txt", "facts_digest": facts, "model_digest": f"{right}", "batch": right + 1, **more}
    result = Result("qa1", 0, 4, right / 4, 0.0, 1.0, 1.0, 1.0, 10.0, 10.0)
    return Report("babilong", f"runs/{right}", settings, [result])


def long_study(folder: Path, reports: dict[str, Report], study: long_texts.Study = STUDY, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    long_texts.write_results(study, reports, more.get("diverged", []), more.get("notes", []), folder)
    return folder / RESULTS


def test_runs_of_a_study_of_long_texts(tmp_path: Path) -> None:
    """Wherever the files of its facts lay, at whatever pace."""
    again = dataclasses.replace(STUDY, models=("window", "titans"), seeds=2, repeated=("titans",), facts="b.txt")
    one = long_study(tmp_path / "one", {"titans-seed0": report(2)}, notes=["said"])
    other = long_study(
        tmp_path / "other", {"titans-seed0": report(2), "titans-seed1": report(4)}, again, diverged=["window-seed0"]
    )
    merge([one, other], tmp_path / "all")
    table = (tmp_path / "all" / TABLE).read_text(encoding="utf-8")
    assert "| `titans` | 2 | qa1 | 75.0 % ± 35.4 (" in table and "n = 8) |" in table
    assert "| `window` | 1 (1 diverged) |" in table and table.endswith("said\n")
    assert (tmp_path / "all" / FIGURE).read_bytes().startswith(b"\x89PNG")
    merge([tmp_path / "all" / RESULTS, one], tmp_path / "more")  # and goes on
    assert json.loads((tmp_path / "more" / RESULTS).read_text(encoding="utf-8")) == json.loads(
        (tmp_path / "all" / RESULTS).read_text(encoding="utf-8")
    )


def test_the_table_tells_which_runs_were_read_in_which_precision(tmp_path: Path) -> None:
    one = long_study(tmp_path / "one", {"titans-seed0": report(2, precision="bfloat16")})
    study = dataclasses.replace(STUDY, models=("window",), precision="bfloat16")
    other = long_study(tmp_path / "other", {"window-seed0": report(4, precision="float32")}, study)
    for round_of_merging in ([one, other], [tmp_path / "all" / RESULTS, other]):
        merge(round_of_merging, tmp_path / "all")
        table = (tmp_path / "all" / TABLE).read_text(encoding="utf-8")
        assert table.endswith("\n\nRead in bfloat16: titans-seed0; in float32: window-seed0.\n")
        assert table.count("Read in") == 1
    assert "Read in" not in (tmp_path / "one" / TABLE).read_text(encoding="utf-8")


def test_other_settings_and_other_results_are_refused(tmp_path: Path) -> None:
    one = long_study(tmp_path / "one", {"titans-seed0": report(2)})
    for study, reports, message in (
        (dataclasses.replace(STUDY, samples=5), {"titans-seed0": report(2)}, "samples is 4 in one and 5 in another"),
        (STUDY, {"titans-seed0": report(3)}, "two of them have titans-seed0, with other results"),
        (
            dataclasses.replace(STUDY, seeds=2),
            {"titans-seed1": report(3, "other")},
            "facts or background are not the same",
        ),
    ):
        other = long_study(tmp_path / "other", reports, study)
        with pytest.raises(ValueError, match=message):
            merge([one, other], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def token_study(folder: Path, trials: list[Measured], **fields: Any) -> Path:
    study = token_tasks.Study((MQAR,), tuple(dict.fromkeys(trial.model for trial in trials)), **fields)
    folder.mkdir(exist_ok=True)
    token_tasks.write_results(study, trials, folder)
    return folder / RESULTS


def test_trials_of_token_tasks(tmp_path: Path) -> None:
    trials = [Measured("titans", MQAR, width, 0, 0.5, 1000, 5000) for width in (8, 16)]
    one = token_study(tmp_path / "one", trials[:1], key_widths=(8,))
    other = token_study(tmp_path / "other", trials, key_widths=(8, 16))
    merge([one, other], tmp_path / "all")
    assert "| `titans` | 50.0 % (1.0 kB) | 50.0 % (1.0 kB) | 50.0 % |" in (tmp_path / "all" / TABLE).read_text()
    assert (tmp_path / "all" / FIGURE).read_bytes().startswith(b"\x89PNG")
    longer = token_study(tmp_path / "longer", trials, budget=token_tasks.Budget(steps=9))
    with pytest.raises(ValueError, match="files: budget is Budget"):
        merge([one, longer], tmp_path / "all")


def test_command(tmp_path: Path) -> None:
    one = long_study(tmp_path / "one", {"titans-seed0": report(2)})
    trial = token_study(tmp_path / "trial", [Measured("titans", MQAR, 8, 0, 0.5, 1000, 5000)])
    damaged, empty = tmp_path / "damaged.json", tmp_path / "empty.json"
    damaged.write_text('{"study": {"model": 1}, "reports": {}}')
    empty.write_text("{}")
    for files, message in (
        ([one, trial], "results of one kind of study"),
        ([one, damaged], f"{damaged}: one of them is damaged"),
        ([one, empty], f"{empty} has no results of `study babilong`"),
        ([one, tmp_path / "absent"], "absent"),
    ):
        refused = CliRunner().invoke(app, ["study", "merge", *map(str, files), "--out", str(tmp_path / "all")])
        assert refused.exit_code == 2 and message in " ".join(refused.stderr.split())
    made = CliRunner().invoke(app, ["study", "merge", str(one), "--out", str(tmp_path / "all")])
    assert made.exit_code == 0 and "| `titans` | 1 | qa1 | 50.0 % (" in made.stdout
