"""Every task from end to end, offline: a perfect reader scores one, a saved model gets a number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atlas_memory.tasks.paper import EvaluationError, Request, evaluate, paper_tasks
from atlas_memory.tasks.paper import run as run_module
from atlas_memory.tasks.paper.loading import task_manager
from atlas_memory.tasks.paper.report import scores_of
from atlas_memory.tasks.paper.run import load_tasks
from tests.tasks.paper.rows import ROWS

TASKS = paper_tasks()
SHOWN = [(task.name, metric) for task in TASKS for metric in task.metrics]


def perfect_reader() -> Any:
    """A model of the harness that gives the answers of `rows.py`, which are written apart from the rows' own labels."""
    from lm_eval.api.model import LM

    class PerfectReader(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [(0.0, True) if self._is_right(request) else (-9.0, False) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [0.0 for _ in requests]

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [f" {ROWS[request.task_name][request.doc_id][1]}" for request in requests]

        def _is_right(self, request: Any) -> bool:
            answer = ROWS[request.task_name][request.doc_id][1]
            return request.args[1] == answer if isinstance(answer, str) else request.idx == answer

    return PerfectReader()


@pytest.fixture(scope="module")
def perfect_scores(data_folder: Path) -> dict[tuple[str, str], float]:
    import lm_eval

    results = lm_eval.simple_evaluate(
        model=perfect_reader(),
        tasks=load_tasks(TASKS, data_folder),
        task_manager=task_manager(TASKS),  # without it the harness reads its fourteen thousand tasks
        bootstrap_iters=0,
        log_samples=False,
    )
    assert set(results["n-shot"].values()) == {0}
    return {(score.task, score.metric): score.value for score in scores_of(results, TASKS)}


@pytest.mark.parametrize(("task", "metric"), SHOWN)
def test_a_perfect_reader_scores_one(task: str, metric: str, perfect_scores: dict[tuple[str, str], float]) -> None:
    assert perfect_scores[task, metric] == 1.0  # accuracy and perplexity alike


def test_recall_tasks_generate_alike(data_folder: Path) -> None:
    for task in load_tasks(paper_tasks("recall"), data_folder):
        task.build_all_requests(limit=1)
        settings = task.instances[0].args[1]
        assert (settings["until"], settings["max_gen_toks"]) == (["\n"], 48), task.task_name


@pytest.fixture(scope="module")
def report(model_folder: Path, data_folder: Path) -> Any:
    return evaluate(Request(model_folder, data=data_folder, batch_size="4", device="cpu"))


def test_a_saved_model_gets_every_score(report: Any, data_folder: Path) -> None:
    assert [(score.task, score.metric) for score in report.scores] == SHOWN
    assert all(score.rows == len(ROWS[score.task]) for score in report.scores)
    assert all(score.value > 1 if "perplexity" in score.metric else 0 <= score.value <= 1 for score in report.scores)
    assert report.left_out == []
    assert set(report.averages()) == {"common_sense", "recall"}


def test_the_report_is_json(report: Any) -> None:
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["scores"][0]["task"] == "wikitext"
    assert {"lm_eval", "transformers", "torch", "atlas-memory"} == set(content["versions"])


def test_limit_and_tasks_without_a_file(model_folder: Path, data_folder: Path, tmp_path: Path) -> None:
    for name in ("swde", "nq_completion"):
        (tmp_path / f"{name}.jsonl").write_bytes((data_folder / f"{name}.jsonl").read_bytes())
    report = evaluate(Request(model_folder, group="recall", data=tmp_path, limit=1, device="cpu", max_length=128))
    assert [(score.task, score.rows) for score in report.scores] == [("swde", 1), ("nq_completion", 1)]
    assert report.left_out == ["drop_completion", "fda", "squad_completion", "triviaqa_completion"]
    assert report.averages() == {}  # an average of two tasks of six compares with nothing
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": Path("absent")}, r"model='absent' is not the folder of a model: it has no config\.json"),
        ({"group": "comon_sense"}, r"group='comon_sense' is unknown\. Nearest: common_sense"),
        ({"batch_size": "0"}, r"batch_size='0' is neither a number from 1 up nor 'auto'"),
        ({"batch_size": "many"}, r"batch_size='many' is neither"),
        ({"limit": 0}, r"limit=0 should be 1 or more"),
        ({"max_length": -1}, r"max_length=-1 should be 1 or more"),
    ],
)
def test_a_bad_request_fails_at_once(model_folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        Request(**{"model": model_folder, **change})


def test_a_model_without_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(EvaluationError, match=r"it has no tokenizer_config\.json"):
        Request(tmp_path)


def test_without_the_harness_the_error_says_what_to_install(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=r"pip install 'atlas-memory\[eval\]'"):
        Request(model_folder)
