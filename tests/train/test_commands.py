"""The commands around training, on the shipped `quick` recipe and on tiny runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.train import Recipe, train
from tests.train.support import tiny_recipe

runner = CliRunner()


def call(*arguments: str | Path, code: int = 0, text: str | None = None) -> str:
    result = runner.invoke(app, [str(argument) for argument in arguments], input=text)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run."""
    folder = tmp_path_factory.mktemp("tiny")
    train(Recipe.model_validate(tiny_recipe(folder)), folder / "runs" / "first", progress=False)
    return folder / "runs" / "first"


def test_quick_from_end_to_end(tmp_path: Path) -> None:
    changes = ["evaluation.batches=1", "data.source.limit=100", "data.rows.length=64"]
    out = tmp_path / "quick"
    options = [word for change in changes for word in ("--set", change)]
    assert str(out / "final") in call("train", "quick", "--out", out, "--steps", "3", *options, "--quiet")
    written = call("generate", out / "final", "--prompt", "def main(", "--tokens", "5", "--seed", "1", "--quiet")
    assert written == call("generate", out / "final", "--tokens", "5", "--seed", "1", "--quiet", text="def main(")
    table = call("eval", "lm", "--model", out / "final", "--validation", "0.02", "--limit", "100", "--tokens", "900")
    assert "512 – 1,023" in table
    assert "quick" in call("runs", tmp_path)
    assert list((out / "tensorboard").rglob("events.out.tfevents.*"))


def test_generating_from_a_file_is_generating_from_its_text(tiny: Path, tmp_path: Path) -> None:
    text = "Line 1 of text 3: 3 is the answer.\n" * 30
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    options = ("--tokens", "8", "--temperature", "0", "--quiet")
    assert call("generate", tiny / "final", "--file", tmp_path / "prompt.txt", *options) == call(
        "generate", tiny / "final", "--prompt", text, *options
    )


def test_runs_and_their_differences(tiny: Path) -> None:
    fields = tiny_recipe(tiny.parent.parent, optimizer={"lr": 0.02}, loop={"steps": 2})
    fields |= {"description": "[bold] or not", "start": [str(tiny / "final")]}
    del fields["model"]
    train(Recipe.model_validate(fields), tiny.parent / "second", progress=False)
    shown = call("runs", tiny.parent, "--compare")
    assert "first" in shown
    assert "optimizer.lr" in shown
    assert "optimizer.eps" not in shown
    assert "[bold] or not" in " ".join(shown.split())


def test_plot(tiny: Path, tmp_path: Path) -> None:
    call("plot", tiny, "--out", tmp_path / "curves.png", "--quantity", "loss", "--quantity", "memory_norm")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_perplexities_as_json(tiny: Path, tmp_path: Path) -> None:
    texts = tiny.parent.parent / "texts"
    call("eval", "lm", "--model", tiny / "final", "--source", texts, "--first", "16", "--out", tmp_path / "lm.json")
    buckets = json.loads((tmp_path / "lm.json").read_text(encoding="utf-8"))
    assert [bucket["begin"] for bucket in buckets[:3]] == [0, 16, 32]
    assert all(bucket["perplexity"] > 1 for bucket in buckets)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "quik", "--out", "x"], "quick"),
        (["train", "quick", "--out", "x", "--set", "loop.stps=3"], "did you mean steps?"),
        (["runs", "nowhere"], "hold no run"),
        (["plot", "nowhere"], "hold no run"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere"),
        (["eval", "lm", "--model", "nowhere"], "nowhere"),
    ],
)
def test_bad_requests_say_what_is_wrong(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert message in call(*arguments, code=2)
    assert not list(tmp_path.iterdir())


def test_an_empty_prompt_is_refused(tiny: Path) -> None:
    assert "prompt is empty" in call("generate", tiny / "final", "--prompt", "", "--quiet", code=2)


def test_plotting_what_was_never_logged(tiny: Path) -> None:
    assert "gradient_norm" in call("plot", tiny, "--quantity", "los", code=2)
