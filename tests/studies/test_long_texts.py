"""A study of BABILong: every model is trained by one recipe, read with, and never twice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.data import make_exercise
from atlas_memory.models.accounting import count_parameters
from atlas_memory.models.configuration_atlas import AtlasConfig
from atlas_memory.studies import long_texts
from atlas_memory.studies.language_models import FIGURE, RESULTS, TABLE
from atlas_memory.studies.long_texts import (
    MODELS,
    REPORT,
    Study,
    base_recipe,
    quick_study,
    recipe_of,
    run_study,
    trained_on,
)
from atlas_memory.tasks.evaluation import load_report
from atlas_memory.tasks.results import Report
from tests.train.support import logged


def test_a_study_is_continued_and_never_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = quick_study(["gated_deltanet", "memory_tokens"])
    first = run_study(study, tmp_path, progress=False)
    assert list(first) == ["gated_deltanet-seed0", "memory_tokens-seed0"]
    assert [result.length for result in first["memory_tokens-seed0"].results] == [0, 200]
    assert (tmp_path / FIGURE).read_bytes().startswith(b"\x89PNG")
    assert "| model | seeds | task | 0K | 200 |" in (tmp_path / TABLE).read_text(encoding="utf-8")
    written = json.loads((tmp_path / RESULTS).read_text(encoding="utf-8"))
    assert {name: Report.from_dict(content) for name, content in written["reports"].items()} == first
    assert written["study"]["samples"] == 2 and written["diverged"] == []
    for name in ("trained", "evaluate"):
        monkeypatch.setattr(long_texts, name, lambda *_: pytest.fail("it was done"))
    assert run_study(study, tmp_path, progress=False) == first


def test_an_evaluation_with_other_settings_is_not_replaced(tmp_path: Path) -> None:
    study = quick_study(["window"])
    run_study(study, tmp_path, progress=False)
    report = tmp_path / "runs" / "window-seed0" / REPORT
    before = report.read_bytes()
    with pytest.raises(ValueError, match=r"babilong\.json holds another evaluation; give the same settings"):
        run_study(dataclasses.replace(study, samples=1), tmp_path, progress=False)
    assert report.read_bytes() == before


def test_a_study_that_was_moved_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = quick_study(["window"])
    run_study(study, tmp_path / "here", progress=False)
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.setattr(long_texts, "evaluate", lambda *_: pytest.fail("it was done"))
    run_study(study, tmp_path / "there", progress=False)


def test_seeds_learn_from_other_stories() -> None:
    base = base_recipe(quick_study(["window"]))
    texts = [make_exercise(recipe_of(base, "window", seed).data.exercises[0], "train").text(0) for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1] and len(set(texts)) == 3


def test_some_models_take_more_seeds_than_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "trained", lambda folder, *_: bool(folder.mkdir(parents=True)))
    study = dataclasses.replace(quick_study(["window", "titans"]), seeds=2, repeated=("titans",))
    run_study(study, tmp_path, progress=False)
    runs = json.loads((tmp_path / RESULTS).read_text(encoding="utf-8"))["diverged"]
    assert runs == ["window-seed0", "titans-seed0", "titans-seed1"]
    table = (tmp_path / TABLE).read_text(encoding="utf-8")
    assert "| `window` | 1 (1 diverged)" in table and "| `titans` | 2 (2 diverged)" in table
    with pytest.raises(ValueError, match="repeated='atlas' is not a choice"):
        dataclasses.replace(study, repeated=("atlas",))


def test_models_that_diverge_stand_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "trained", lambda folder, *_: bool(folder.mkdir(parents=True)))
    assert run_study(quick_study(["window"]), tmp_path, progress=False) == {}
    assert "| `window` | 1 (1 diverged) |  | diverged | diverged |" in (tmp_path / TABLE).read_text(encoding="utf-8")
    assert json.loads((tmp_path / RESULTS).read_text(encoding="utf-8"))["diverged"] == ["window-seed0"]


def test_models_have_as_many_parameters_as_the_recipes_own() -> None:
    base = base_recipe(Study())
    sizes = {
        model: sum(count_parameters(AtlasConfig(**recipe_of(base, model, 0).model, vocab_size=4096)))
        for model in MODELS
    }
    assert max(sizes.values()) < 1.03 * min(sizes.values()), sizes


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("babilong-joined", "recipe='babilong-joined' goes on from a trained model; accepted: one with `model`."),
        ("paper-340m", "recipe='paper-340m' has model.size; accepted: one with widths and depth of its own."),
    ],
)
def test_recipes_without_a_model_of_their_own_are_refused(recipe: str, message: str, tmp_path: Path) -> None:
    """Before anything else: the facts are not there either."""
    arguments = ["--recipe", recipe, "--facts", str(tmp_path / "absent"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["study", "babilong", *arguments])
    assert result.exit_code == 2 and result.stderr == f"error: {message}\n"
    assert not (tmp_path / "out").exists()


def test_text_of_the_training_is_known(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("A sentence that is long enough to be kept in a background.")
    changes = quick_study(["window"]).changes
    recipe = base_recipe(Study("demo", changes))
    assert trained_on(recipe, "builtin") and not trained_on(recipe, str(tmp_path))
    lessons = f"data.exercises=[{{name: babilong, options: {{background: '{tmp_path}/a.txt'}}}}]"
    recipe = base_recipe(Study("demo", (*changes, lessons)))
    assert not trained_on(recipe, "builtin") and not trained_on(recipe, f"{tmp_path}/b.txt")
    assert trained_on(recipe, str(tmp_path)) and trained_on(
        recipe, f"{tmp_path}/b.txt,{tmp_path}/../{tmp_path.name}/a.txt"
    )
    source = f"data.source={{kind: text, path: '{tmp_path}'}}"
    assert not trained_on(base_recipe(Study("demo", (*changes, lessons, source))), f"{tmp_path}/b.txt")
    mixed = lessons.replace("babilong,", "babilong, share: 0.5,")
    assert trained_on(base_recipe(Study("demo", (*changes, mixed, source))), f"{tmp_path}/b.txt")


def test_command(tmp_path: Path) -> None:
    arguments = ["study", "babilong", "--quick", "--quiet", "--models", "window", "--out", str(tmp_path)]
    arguments[2:2] = ["--set", "loop.steps=2", "--lengths", "100", "--batch", "1"]  # of the quick one too
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "| `window` | 1 | qa1 | " in result.output and ", n = 2) |" in result.output
    assert "| 100 |" in result.output
    warning = "background='builtin': recipe='demo' trains on this text too"
    assert warning in " ".join(result.stderr.split()) and warning in (tmp_path / TABLE).read_text(encoding="utf-8")
    assert logged(tmp_path / "runs" / "window-seed0", "step")[-1] == 2
    assert load_report(tmp_path / "runs" / "window-seed0" / REPORT).settings["batch"] == 1
    result = CliRunner().invoke(app, [*arguments[:-3], "nobody", *arguments[-2:]])
    assert result.exit_code == 2
    assert "nobody" in result.output
