"""Small models on MQAR and MAD, from nothing to their tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.studies import token_tasks
from atlas_memory.studies.language_models import FIGURE, RESULTS, TABLE
from atlas_memory.studies.token_tasks import MQAR, Budget, Measured, Pupil, Study, Trial, learn, markdown, run_study
from atlas_memory.tasks import mad
from atlas_memory.tasks.samples import Examples

TINY = Budget(steps=2, batch=4, hidden_size=16, layers=1)


@pytest.mark.parametrize("task", [MQAR, *mad.TASKS])
def test_every_task_is_learned_evaluated_and_never_repeated(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study((task,), ("gated_deltanet",), (8,), budget=TINY)
    (first,) = run_study(study, tmp_path, progress=False)
    assert 0 <= first.accuracy <= 1
    assert first.state_bytes > 0
    assert (tmp_path / FIGURE).read_bytes().startswith(b"\x89PNG")
    assert "| `gated_deltanet` |" in (tmp_path / TABLE).read_text(encoding="utf-8")
    assert len(json.loads((tmp_path / RESULTS).read_text(encoding="utf-8"))["trials"]) == 1
    monkeypatch.setattr(token_tasks, "run_trial", lambda *_: pytest.fail("it was finished"))
    assert run_study(study, tmp_path, progress=False) == [first]
    other = Study((task,), ("gated_deltanet",), (8,), budget=Budget(steps=3))
    with pytest.raises(ValueError, match="choose another folder"):
        run_study(other, tmp_path, progress=False)


@pytest.mark.parametrize("task", ["memorization", "compression"])
def test_losses_fall(task: str) -> None:
    """Of a few examples that are seen again and again."""
    study = Study((task,), ("gated_deltanet",), (8,), budget=Budget(steps=60, batch=8, lr=1e-2, hidden_size=32))
    trial = study.trials()[0]
    inputs, targets = mad.training(task)
    losses = learn(Pupil(trial, study), [Examples(inputs[:8], targets[:8])], study.budget, 0, "", progress=False)
    assert losses[-1] < 0.5 * losses[0]


def test_data_are_the_same_for_all_models() -> None:
    study = Study((MQAR,), ("transformer", "titans"))
    first, second = (token_tasks._training(trial, "small") for trial in study.trials())
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, second, strict=True))


def test_tables() -> None:
    def entry(model: str, task: str, width: int, accuracy: float) -> Measured:
        return Measured(model, task, width, 0, accuracy, 1000 * width, 5000)

    sizes = markdown([entry("a", MQAR, 8, 0.25), entry("a", MQAR, 16, 0.5), entry("b", MQAR, 8, 1.0)])
    assert "| `a` | 25.0 (8.0 kB) | 50.0 (16.0 kB) | 37.5 |" in sizes
    assert "| `b` | 100.0 (8.0 kB) | – | 100.0 |" in sizes
    tasks = markdown([entry("a", "memorization", 16, 0.25), entry("a", "compression", 16, 0.75)])
    assert "| `a` | 25.0 | 75.0 | 50.0 |" in tasks


def test_commands(tmp_path: Path) -> None:
    arguments = ["--models", "gated_deltanet", "--steps", "1", "--quiet", "--out"]
    result = CliRunner().invoke(app, ["study", "mad", "--tasks", "memorization", *arguments, str(tmp_path / "mad")])
    assert result.exit_code == 0, result.output
    assert "| model | memorization | mean |" in result.output
    result = CliRunner().invoke(app, ["study", "mqar", "--models", "nobody", "--out", str(tmp_path / "mqar")])
    assert result.exit_code == 2
    assert "nobody" in result.output


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="task"):
        Trial("titans", "nothing", 8, 0)
