"""The commands a person types, and their help."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atlas_memory.cli import app, long_contexts
from atlas_memory.tasks import lm, mad, precision
from atlas_memory.tasks.evaluation import Request
from atlas_memory.tasks.results import Report
from tests.tasks.conftest import save_small


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


NAMES = {"babilong": "shipped", "niah": "my-model", "mqar": "my-mqar-model", "mad": "my-mad-model"}


@pytest.mark.parametrize("name", NAMES)
def test_the_example_in_the_help_works_as_printed(
    name: str, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, stdout, _ = run("eval", name, "--help")
    found = re.search(r"Example: atlas-memory (.*?\.json)", " ".join(stdout.replace("│", " ").split()))
    assert code == 0 and found is not None
    monkeypatch.chdir(tmp_path)
    model = tmp_path / NAMES[name]
    if name == "niah":
        model.symlink_to(byte_model)
    elif name != "babilong":  # which has the shipped one
        save_small(model, 8192)
    # A later option wins: fewer and shorter samples, the rest as printed.
    few = ["--samples", "2", *(["--lengths", "300"] if name in ("babilong", "niah") else [])]
    few += ["--depths", "0.5"] if name == "niah" else []
    code, stdout, stderr = run(*shlex.split(found[1]), *few)
    assert code == 0, stderr
    assert name in stdout
    assert {row["samples"] for row in json.loads((tmp_path / f"{name}.json").read_text())["results"]} == {2}
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_errors_are_one_line_and_leave_nothing(byte_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    for arguments, message in (
        (["babilong", "--lengths", "4x"], "error: lengths='4x' is no number"),
        (["babilong", "--tasks", "qa1,qa99"], "error: task='qa99' is not a choice"),
        (["babilong", "--facts", "absent"], "error: facts='absent'"),
        (["babilong", "--background", "absent"], "error: background='absent'"),
        (["babilong", "--tasks", ""], "error: there is nothing to evaluate; give at least one of --tasks"),
        (["niah", "--depths", "x"], "error: depths: 'x' is not a number"),
        (["niah", "--tasks", "single_1,singel_2"], "error: task='singel_2' is not a choice"),
        (["niah", "--depths", "0,50"], "error: depth=50.0 must lie between 0"),
        (["mqar", "--scale", "huge"], "error: scale='huge' is not a choice"),
        (["niah", "--seed", "-1"], "error: seed=-1 must be a whole number from 0 to 2**32 - 1"),
        (["mqar", "--seed", "4294967296"], "error: seed=4294967296 must be a whole number from 0 to"),
        (["mad", "--seed", "-1"], "error: seed=-1 must be a whole number from 0 to"),
        (["mad", "--tasks", "compression"], f"error: model='{byte_model}' has no compression_decoder.safetensors"),
        (["mad", "--tasks", "sorting"], "error: task='sorting' is not a choice"),
    ):
        code, _, stderr = run("eval", *arguments, "--model", byte_model, "--out", out)
        assert code == 2 and stderr.startswith(message), stderr
    code, _, stderr = run("eval", "mad", "--model", byte_model, "--out", out.with_suffix(".png"))
    assert code == 2 and "is where the figure goes" in stderr
    assert list(tmp_path.iterdir()) == []
    out.with_suffix(".png").mkdir()
    code, _, stderr = run("eval", "babilong", "--model", byte_model, "--out", out)
    assert code == 2 and "out.png', which is a folder; choose another name" in stderr
    assert not out.exists()


def test_a_model_for_one_task_is_told_so_before_any_work(tmp_path: Path) -> None:
    model = save_small(tmp_path / "model", 20)
    code, _, stderr = run("eval", "mad", "--model", model, "--out", tmp_path / "mad.json")
    fitting = [task for task in mad.SCORED if mad.SCALES["small"][task].vocabulary <= 20]
    assert code == 2 and "error: model has vocab_size=20, but " in stderr
    assert f"give what it was trained for, of --tasks {','.join(fitting)}." in stderr and fitting
    assert list(tmp_path.iterdir()) == [model]


def test_a_cell_asked_for_twice_is_one(byte_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    common = ("--model", byte_model, "--samples", "1", "--lengths", "300,300", "--out", out)
    for arguments in (("babilong", "--tasks", "qa1,qa1"), ("niah", "--tasks", "single_1", "--depths", "0,0.0")):
        assert run("eval", *arguments, *common, "--again")[0] == 0
        assert len(json.loads(out.read_text())["results"]) == 1


def test_what_is_finished_is_not_repeated(byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    command = ("eval", "babilong", "--model", byte_model, "--samples", "2", "--lengths", "0k", "--out", out)
    asked, evaluate = [], long_contexts.evaluate

    def watched(request: Request) -> Report:
        asked.append(request)
        return evaluate(request)

    monkeypatch.setattr(long_contexts, "evaluate", watched)
    notes = [run(*command, *more)[2] for more in ((), (), ("--again",), ("--batch", "1"), ("--seed", "1"))]
    assert len(asked) == 2
    told = [f"{out} has these results already; --again" in note for note in notes]
    assert told == [False, True, False, True, False]
    assert f"out='{out}' holds something else; --again replaces it." in notes[-1]


def test_what_others_have_left_is_not_replaced(byte_model: Path, tmp_path: Path) -> None:
    one, both, kept = (tmp_path / name for name in ("one.json", "both.json", "kept.json"))
    command = ("eval", "babilong", "--model", byte_model, "--samples", "1", "--lengths", "0k", "--out")
    kept.with_suffix(".png").write_text("a picture")
    code, _, stderr = run(*command, kept)
    assert code == 2 and "kept.png'; choose another name" in stderr and not kept.exists()

    assert run(*command, one)[0] == 0
    kept.write_text("something else")
    code, _, stderr = run("eval", "merge", one, "--out", kept)
    assert code == 2 and "holds something else; --again replaces it" in stderr
    assert kept.read_text() == "something else"
    for arguments in ((one, "--out", both), (one, "--out", both), (one, "--out", kept, "--again")):
        assert run("eval", "merge", *arguments)[0] == 0
    assert kept.read_text() == both.read_text()


def test_the_precision_is_that_of_the_work_that_is_gone_on_with(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast the machine is today."""
    out = tmp_path / "out.json"
    command = ("eval", "babilong", "--model", byte_model, "--samples", "1", "--lengths", "0k", "--out", out)
    for faster in (True, False):
        monkeypatch.setattr(precision, "_half_is_faster", lambda faster=faster: faster)
        code, _, stderr = run(*command)
        assert code == 0, stderr
    assert "has these results already" in stderr
    assert json.loads(out.read_text())["settings"]["precision"] == "bfloat16"


def test_perplexities_as_json(byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "lm.json"
    monkeypatch.setattr(lm, "evaluate", lambda *_, **__: [lm.Bucket(0, 128, 5, 1.0), lm.Bucket(128, 256, 5, math.nan)])
    code, stdout, stderr = run("eval", "lm", "--model", tmp_path / "a[/b]", "--out", out)
    assert code == 0, stderr
    assert "a[/b] on builtin" in " ".join(stdout.split())

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    first, second = json.loads(out.read_text(), parse_constant=refuse)
    assert first["loss"] == 1.0 and first["perplexity"] == pytest.approx(math.e)
    assert second == {"begin": 128, "end": 256, "tokens": 5, "loss": None, "perplexity": None}
    assert list(tmp_path.iterdir()) == [out]


def test_an_output_that_cannot_be_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr(lm, "evaluate", fail)
    for out, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "absent" / "lm.json", "does not exist"),
        (Path("/proc/lm.json"), "cannot be written"),
    ):
        code, _, stderr = run("eval", "lm", "--model", "any", "--out", out)
        assert code == 2 and stderr.startswith("error: out=") and message in stderr
