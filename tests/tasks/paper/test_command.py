"""The two commands a person types: `atlas-memory eval paper`, and the harness's own `lm_eval`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from atlas_memory.cli import app


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["eval", "paper", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_scores_as_table_and_file(model_folder: Path, data_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    options = ("--group", "recall", "--data", data_folder, "--limit", "1", "--device", "cpu", "--out", out)
    code, stdout, stderr = run("--model", model_folder, *options)
    assert code == 0, stderr
    assert "squad_completion" in stdout and "recall: average" in stdout
    assert len(json.loads(out.read_text())["scores"]) == 6


def test_errors_are_one_line_and_leave_no_file(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    code, _, stderr = run("--model", model_folder, "--group", "recal", "--out", out)
    assert code == 2 and stderr.startswith("error: group='recal' is unknown. Nearest: recall")
    code, _, stderr = run("--model", tmp_path / "absent")
    assert code == 2 and "it has no config.json" in stderr
    code, _, stderr = run("--model", model_folder, "--out", tmp_path / "absent" / "scores.json")
    assert code == 2 and "does not exist" in stderr
    code, _, stderr = run("--model", model_folder, "--group", "common_sense", "--out", out)
    assert code == 2 and "pass --data FOLDER" in stderr  # the tests are offline
    assert not out.exists()


LOCAL_TASK = """
task: local_questions
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "Question: {{{{goal}}}}\\nAnswer:"
doc_to_choice: "{{{{[sol1, sol2]}}}}"
doc_to_target: label
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def test_the_harness_s_own_command_with_a_local_task_file(
    model_folder: Path, data_folder: Path, tmp_path: Path
) -> None:
    task = "local_questions"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / f"{task}.yaml").write_text(LOCAL_TASK.format(file=data_folder / "piqa.jsonl"))
    command = [str(Path(sys.executable).with_name("lm_eval")), "--model", "hf"]
    command += ["--model_args", f"pretrained={model_folder},trust_remote_code=True", "--tasks", task]
    command += ["--include_path", str(tmp_path / "tasks"), "--device", "cpu", "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline})
    assert result.returncode == 0, result.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    assert 0 <= json.loads(file.read_text())["results"][task]["acc,none"] <= 1
