"""Small models on MQAR and MAD, from nothing to their tables."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.layers import Memory
from atlas_memory.studies import token_tasks
from atlas_memory.studies.language_models import FIGURE, RESULTS, TABLE
from atlas_memory.studies.token_tasks import (
    BUDGETS,
    MAD,
    MQAR,
    Budget,
    Pupil,
    Study,
    Trial,
    learn,
    run_study,
)
from atlas_memory.tasks import mad, mqar
from atlas_memory.tasks.evaluation import Request
from atlas_memory.tasks.results import Report
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


@pytest.mark.parametrize(("model", "interval"), [("atlas", 4), ("atlas+mag", 4), ("titans", 64)])
def test_muon_is_updated_often_enough_to_be_asked_in_short_texts(model: str, interval: int) -> None:
    budget = dataclasses.replace(TINY, interval=4)
    pupil = Pupil(Trial(model, MQAR, 8, seed=0), Study((MQAR,), (model,), (8,), budget=budget))
    assert {module.spec.interval for module in pupil.modules() if isinstance(module, Memory)} == {interval}


def test_settings_are_compared_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a trial that would come last."""
    run_study(Study(("memorization",), ("titans",), (8,), budget=TINY), tmp_path, progress=False)
    monkeypatch.setattr(token_tasks, "run_trial", lambda *_: pytest.fail("it trained"))
    other = dataclasses.replace(TINY, steps=3)
    with pytest.raises(ValueError, match="choose another folder"):
        run_study(Study(("memorization",), ("gated_deltanet", "titans"), (8,), budget=other), tmp_path, progress=False)


def test_evaluations_know_all_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an evaluation of a model of another budget must not be gone on with."""
    asked = []
    evaluate = token_tasks.evaluate

    def watched(request: Request, progress: bool) -> Report:
        asked.append(request.settings)
        return evaluate(request, progress=progress)

    monkeypatch.setattr(token_tasks, "evaluate", watched)
    run_study(Study(("memorization",), ("gated_deltanet",), (8,), budget=TINY), tmp_path, progress=False)
    assert asked == [{"scale": "small", "seed": 0, **dataclasses.asdict(TINY)}]


def test_a_trial_that_was_stopped_begins_anew(tmp_path: Path) -> None:
    """What is left of an evaluation may be of other weights than those trained now, and must not stand in the way."""
    study = Study(("memorization",), ("gated_deltanet",), (8,), budget=TINY)
    left = tmp_path / "trials" / study.trials()[0].name / f"{token_tasks.REPORT}.work" / "finished.json"
    left.parent.mkdir(parents=True)
    left.write_text(json.dumps({"settings": {"model_digest": "another"}, "finished": []}), encoding="utf-8")
    assert len(run_study(study, tmp_path, progress=False)) == 1


def poisoned(monkeypatch: pytest.MonkeyPatch, steps: Callable[[int], bool]) -> None:
    """Where `steps` says so, the loss is not a number, and neither are its gradients."""
    forward, calls = Pupil.forward, itertools.count()

    def broken(pupil: Pupil, inputs: Tensor, targets: Tensor) -> Tensor:
        return forward(pupil, inputs, targets) * (float("nan") if steps(next(calls)) else 1.0)

    monkeypatch.setattr(Pupil, "forward", broken)


def test_a_step_that_is_not_finite_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(("memorization",), ("gated_deltanet",), (8,), budget=dataclasses.replace(TINY, steps=30))
    poisoned(monkeypatch, lambda call: call % 10 != 9)  # nine of ten
    pupil, groups = Pupil(study.trials()[0], study), [mad.training("memorization")]
    before = {name: parameter.clone() for name, parameter in pupil.named_parameters()}
    losses = learn(pupil, groups, study.budget, 0, "", progress=False)
    assert [math.isfinite(loss) for loss in losses] == [call % 10 == 9 for call in range(30)]
    assert all(parameter.isfinite().all() for parameter in pupil.parameters())
    assert any(not torch.equal(before[name], parameter) for name, parameter in pupil.named_parameters())


@pytest.mark.parametrize("steps", [3, 40])
def test_a_trial_that_diverges_is_a_result(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = dataclasses.replace(TINY, steps=steps)
    study = Study((MQAR,), ("gated_deltanet", "transformer"), (8,), budget=budget)
    poisoned(monkeypatch, lambda call: call < min(steps, 10))  # the first model alone
    broken, sound = run_study(study, tmp_path, progress=False)
    assert (broken.diverged, broken.accuracy, sound.diverged) == (True, 0.0, False)
    assert broken.state_bytes > 0
    assert "| `gated_deltanet` | diverged (" in (tmp_path / TABLE).read_text(encoding="utf-8")
    monkeypatch.setattr(token_tasks, "run_trial", lambda *_: pytest.fail("it was finished"))
    assert run_study(study, tmp_path, progress=False) == [broken, sound]


@pytest.mark.parametrize("model", ["gated_deltanet", "transformer"])
def test_weights_that_grow_too_large_diverge(model: str, tmp_path: Path) -> None:
    study = Study(("memorization",), (model,), (8,), budget=dataclasses.replace(TINY, lr=1e37))
    assert run_study(study, tmp_path, progress=False)[0].diverged


class Breaking(torch.optim.SGD):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.param_groups[0]["params"][0].fill_(float("inf"))


def test_weights_that_the_last_step_broke_diverge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pupil, "optimizers", lambda pupil, lr: [Breaking(pupil.parameters(), lr)])
    study = Study(("memorization",), ("transformer",), (8,), budget=dataclasses.replace(TINY, steps=1))
    assert run_study(study, tmp_path, progress=False)[0].diverged


def test_a_model_that_cannot_be_evaluated_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite weights, with which activations are not; any other error is one."""
    study = Study(("memorization",), ("gated_deltanet",), (8,), budget=TINY)

    def failing(message: str) -> None:
        def evaluate(*_: object, **__: object) -> Report:
            raise ValueError(message)

        monkeypatch.setattr(token_tasks, "evaluate", evaluate)

    failing("out='x' is a folder")
    with pytest.raises(ValueError, match="is a folder"):
        run_study(study, tmp_path, progress=False)
    with pytest.raises(ValueError, match="NaN") as raised:
        Memory(8, 1)(torch.full((1, 3, 8), float("nan")))
    failing(str(raised.value))
    assert run_study(study, tmp_path, progress=False)[0].diverged


@pytest.mark.parametrize("task", ["memorization", "compression"])
def test_losses_fall(task: str) -> None:
    """Of a few examples that are seen again and again."""
    study = Study((task,), ("gated_deltanet",), (8,), budget=Budget(steps=60, batch=8, lr=1e-2, hidden_size=32))
    trial = study.trials()[0]
    inputs, targets = mad.training(task)
    losses = learn(Pupil(trial, study), [Examples(inputs[:8], targets[:8])], study.budget, 0, "", progress=False)
    assert losses[-1] < 0.5 * losses[0]


def test_public_budgets_are_the_published_passes_over_the_examples() -> None:
    assert tuple(BUDGETS) == tuple(mqar.SCALES)[::-1] == tuple(mad.SCALES)[::-1]
    budget = BUDGETS["public"][MAD]
    assert budget.steps_on(12_800) == 20_000 and budget.steps_on(256) == 400
    assert BUDGETS["public"][MQAR].steps_on(180_000) == 22_500
    assert BUDGETS["small"][MQAR].steps_on(180_000) == 1600


def test_passes_are_learned_in_the_place_of_steps() -> None:
    study = Study(("memorization",), ("gated_deltanet",), (8,), budget=dataclasses.replace(TINY, epochs=3))
    trial = Trial("gated_deltanet", "memorization", 8, 0)
    examples = mad.training("memorization", "small", 0)
    few = Examples(examples.inputs[:6], examples.targets[:6])
    assert len(learn(Pupil(trial, study), [few], study.budget, 0, "", progress=False)) == 5  # 18 examples, 4 a step


def test_data_are_the_same_for_all_models() -> None:
    study = Study((MQAR,), ("transformer", "titans"))
    first, second = (token_tasks._training(trial, "small") for trial in study.trials())
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["mad", "mqar", "language-models"])
def test_matplotlib_is_asked_for_before_anything_is_done(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    arguments = ["--quick"] if name == "language-models" else ["--steps", "1"]
    result = CliRunner().invoke(app, ["study", name, *arguments, "--out", str(tmp_path / "study")])
    assert result.exit_code == 2
    assert "needs matplotlib: pip install 'atlas-memory[figures]'" in result.output
    assert not (tmp_path / "study").exists()


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
