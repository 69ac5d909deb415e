"""A study of BABILong: every model is trained by one recipe, read with, and never twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.models.accounting import count_parameters
from atlas_memory.models.configuration_atlas import AtlasConfig
from atlas_memory.studies import long_texts
from atlas_memory.studies.language_models import FIGURE, TABLE
from atlas_memory.studies.long_texts import MODELS, Study, quick_study, recipe_of, run_study
from tests.train.support import logged


def test_a_study_is_continued_and_never_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = quick_study(["gated_deltanet", "memory_tokens"])
    first = run_study(study, tmp_path, progress=False)
    assert list(first) == ["gated_deltanet-seed0", "memory_tokens-seed0"]
    assert [result.length for result in first["memory_tokens-seed0"].results] == [0, 200]
    assert (tmp_path / FIGURE).read_bytes().startswith(b"\x89PNG")
    assert "| model | 0K | 200 |" in (tmp_path / TABLE).read_text(encoding="utf-8")
    for name in ("trained", "evaluate"):
        monkeypatch.setattr(long_texts, name, lambda *_: pytest.fail("it was done"))
    assert run_study(study, tmp_path, progress=False) == first


def test_models_that_diverge_stand_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "trained", lambda folder, *_: bool(folder.mkdir(parents=True)))
    assert run_study(quick_study(["window"]), tmp_path, progress=False) == {}
    assert "| `window-seed0` | diverged | diverged |" in (tmp_path / TABLE).read_text(encoding="utf-8")


def test_models_have_as_many_parameters_as_the_recipes_own() -> None:
    study = Study()
    sizes = {
        model: sum(count_parameters(AtlasConfig(**recipe_of(study, model, 0).model, vocab_size=4096)))
        for model in MODELS
    }
    assert max(sizes.values()) < 1.03 * min(sizes.values()), sizes


def test_command(tmp_path: Path) -> None:
    arguments = ["study", "babilong", "--quick", "--quiet", "--models", "window", "--out", str(tmp_path)]
    arguments[2:2] = ["--set", "loop.steps=2", "--lengths", "100"]  # of the quick one too
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "`window-seed0`" in result.output
    assert "| 100 |" in result.output
    assert logged(tmp_path / "runs" / "window-seed0", "step")[-1] == 2
    result = CliRunner().invoke(app, [*arguments[:-3], "nobody", *arguments[-2:]])
    assert result.exit_code == 2
    assert "nobody" in result.output
