"""The groups: what they hold, and that the harness knows all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atlas_memory.tasks.paper import GROUPS, EvaluationError, paper_tasks
from atlas_memory.tasks.paper.loading import task_manager
from tests.tasks.paper.rows import ROWS


def test_the_groups_hold_the_papers_tasks() -> None:
    names = {group: [task.name for task in paper_tasks(group)] for group in GROUPS}
    assert names == {
        "common_sense": [
            *("wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande"),
            *("arc_easy", "arc_challenge", "social_iqa", "boolq"),
        ],
        "recall": ["swde", "nq_completion", "drop_completion", "fda", "squad_completion", "triviaqa_completion"],
    }
    assert [task.name for task in paper_tasks("all")] == names["common_sense"] + names["recall"] == list(ROWS)


def test_an_unknown_group_names_the_nearest() -> None:
    with pytest.raises(EvaluationError, match=r"group='recal' is unknown\. Nearest: recall, .*Known: common_sense, "):
        paper_tasks("recal")


def test_the_harness_lists_the_groups_and_every_task() -> None:
    manager = task_manager(paper_tasks())
    assert {f"paper_{group}" for group in GROUPS} <= set(manager.all_groups)
    assert {task.name for task in paper_tasks()} <= set(manager.all_subtasks)


@pytest.mark.parametrize("task", paper_tasks(), ids=lambda task: task.name)
def test_every_shown_metric_is_one_the_harness_computes(task) -> None:
    config = task_manager([task]).task_index[task.name].cfg
    if "class" in config:  # three tasks are Python classes; the tests of run.py read their metric
        return
    assert set(task.metrics) <= {metric["metric"] for metric in config["metric_list"]}
    assert config["dataset_path"].count("/") == 1  # owner/name on the hub


def test_importing_the_package_and_its_command_imports_no_harness() -> None:
    code = "import sys, atlas_memory, atlas_memory.cli; print({'lm_eval', 'datasets'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
