"""A study of language models, from nothing to its table."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.models.accounting import count_parameters, fitted_config
from atlas_memory.studies import language_models, runs
from atlas_memory.studies.language_models import FIGURE, MODELS, RESULTS, TABLE, Study, quick_study, run_study
from atlas_memory.studies.summaries import Result, figure, markdown, summarise
from atlas_memory.train import Recipe
from tests.train.support import write_texts


def tiny(folder: Path, **changes: object) -> Study:
    fields = {"data": str(write_texts(folder / "texts")), "models": ("gated_deltanet", "titans"), "tokens": 512}
    cache = f"data.cache={json.dumps(str(folder / 'cache'))}"
    settings = ("evaluation.batches=1", "logging.every=1", "data.validation=0.2", cache)
    return dataclasses.replace(quick_study(), **{**fields, "changes": settings, **changes})


def test_a_study_is_continued_and_never_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, out = tiny(tmp_path), tmp_path / "study"
    first = run_study(study, out, progress=False)
    assert [result.model for result in first] == ["gated_deltanet", "titans"]
    assert all(abs(result.parameters - study.parameters) < 0.02 * study.parameters for result in first)
    assert all(result.tokens[-1] == study.tokens for result in first)
    assert (out / FIGURE).read_bytes().startswith(b"\x89PNG")
    assert "| `titans` |" in (out / TABLE).read_text(encoding="utf-8")
    assert len(json.loads((out / RESULTS).read_text(encoding="utf-8"))["runs"]) == 2
    shutil.rmtree(out / "runs" / "titans-seed0" / "final")  # as if it had been killed before its end
    trained = []
    train = runs.train

    def watched(recipe: object, folder: Path, **options: object) -> Path:
        trained.append(folder.name)
        return train(recipe, folder, **options)

    monkeypatch.setattr(runs, "train", watched)
    assert run_study(study, out, progress=False) == first
    assert trained == ["titans-seed0"]
    with pytest.raises(ValueError, match=r"holds gated_deltanet-seed0 with .*=.*another folder"):
        run_study(dataclasses.replace(study, tokens=1024), out, progress=False)


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that stops where its first run would begin."""

    def stop(*_: object, **__: object) -> None:
        raise InterruptedError("training begins")

    monkeypatch.setattr(runs, "train", stop)


def test_a_tokenizer_is_of_one_study(tmp_path: Path, untrained: None) -> None:
    study, out = tiny(tmp_path), tmp_path / "study"
    with pytest.raises(InterruptedError):
        run_study(study, out, progress=False)
    files = {path.name: path.read_bytes() for path in (out / "tokenizer").iterdir()}
    other_texts = str(write_texts(tmp_path / "others"))
    for change, named in (
        ({"vocabulary": 400}, r"vocabulary=512, and not 400"),
        ({"data": other_texts}, r"source\.path='.*texts', and not '.*others'"),
        ({"changes": (*study.changes, "data.source.limit=5")}, r"source\.limit=None, and not 5"),
        ({"changes": (*study.changes, "data.validation=0.5")}, r"validation=0\.2, and not 0\.5"),
    ):
        with pytest.raises(ValueError, match=f"tokenizer was made with {named}; .*another folder"):
            run_study(dataclasses.replace(study, **change), out, progress=False)
    assert files == {path.name: path.read_bytes() for path in (out / "tokenizer").iterdir()}
    with pytest.raises(InterruptedError):  # more seeds are the same study
        run_study(dataclasses.replace(study, seeds=2), out, progress=False)


def test_a_tokenizer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(language_models, "read_documents", interrupted)
    with pytest.raises(InterruptedError):
        run_study(tiny(tmp_path), tmp_path / "study", progress=False)
    assert not list(tmp_path.glob("study/*"))


def test_there_is_a_figure_after_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, out = runs.train, tmp_path / "study"

    def first_alone(recipe: Recipe, folder: Path, **options: bool) -> Path:
        if folder.name == "titans-seed0":
            raise InterruptedError
        return train(recipe, folder, **options)

    monkeypatch.setattr(runs, "train", first_alone)
    with pytest.raises(InterruptedError):
        run_study(tiny(tmp_path), out, progress=False)
    assert all((out / name).is_file() for name in (RESULTS, TABLE, FIGURE))


def test_a_figure_of_diverged_runs_alone(tmp_path: Path) -> None:
    figure([Result("a", 0, 1000, True, [64], [9.0], [])], tmp_path / FIGURE)
    assert (tmp_path / FIGURE).is_file()


@pytest.mark.slow
def test_quick_does_everything(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["study", "language-models", "--quick", "--quiet", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert all(f"`{model}`" in result.output for model in MODELS)
    assert (tmp_path / FIGURE).is_file()


def test_parameters_are_fitted_with_the_initial_values() -> None:
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    for model in MODELS.values():
        config = fitted_config(1_000_000, initial=True, width_step=8, **fields, **model)
        assert sum(count_parameters(config)) == pytest.approx(1e6, rel=0.005)


def test_rows_of_results() -> None:
    def result(model: str, seed: int, loss: float, diverged: bool = False) -> Result:
        return Result(model, seed, 1000, diverged, [64], [loss], [100.0 * (seed + 1)])

    rows = summarise([result("a", 0, 3.0), result("a", 1, 5.0), result("b", 0, 2.0), result("b", 1, 9.0, True)])
    assert [(row.loss, row.diverged, row.tokens_per_second) for row in rows] == [(4.0, 0, 150.0), (2.0, 1, 150.0)]
    assert rows[0].deviation == pytest.approx(2**0.5)
    lines = markdown(rows).splitlines()
    assert "2.0000 (1 diverged)" in lines[2]
    assert "4.0000 ± 1.4142" in lines[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "data must be given"),
        (["--quick", "--models", "atlas,llama"], "models=llama must be among"),
        (["--quick", "--tokens", "many"], "tokens='many' is no number"),
        (["--quick", "--parameters", "1k"], "parameters=1,000 cannot be met by"),
        (["--data", "nowhere"], "source='nowhere'"),
        (["--quick", "--set", "model.intermediate_size=64"], "intermediate_size=64 must be left out"),
    ],
)
def test_bad_requests_are_named(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["study", "language-models", "--out", str(tmp_path / "study"), *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "study").exists()
