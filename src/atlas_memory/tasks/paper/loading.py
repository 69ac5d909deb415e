"""Tasks of the harness with their data: from the hub as the harness loads them, or from local files.

A local file changes where the rows come from and nothing else: prompt, preparation and score stay the harness's own.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas_memory.tasks.paper.groups import HARNESS_FOLDER, EvaluationError, PaperTask, paper_tasks, unknown


def task_manager(tasks: Sequence[PaperTask]) -> Any:
    """The harness's index of these tasks. Only their folders are read: all of them are fourteen thousand tasks."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    folders = sorted({root / task.folder if task.folder else HARNESS_FOLDER for task in tasks})
    return lm_eval.tasks.TaskManager(include_path=list(folders), include_defaults=False)


def load_from_hub(manager: Any, task: PaperTask) -> Any:
    """The harness's task with the public dataset."""
    try:
        return manager.load(task.name)["tasks"][task.name]
    except OSError as error:  # the hub's errors, without a network or without the dataset, are all of this kind
        columns = ", ".join(task.columns)
        raise EvaluationError(
            f"task {task.name!r}: its dataset did not come from the hub ({error}). Without a hub, put the rows in "
            f"FOLDER/{task.name}.jsonl, one JSON object a line with the columns {columns}, and pass --data FOLDER."
        ) from error


def find_files(folder: Path, tasks: Sequence[PaperTask]) -> dict[str, Path]:
    """Which of the tasks have a file in the folder: task name → path."""
    if not folder.is_dir():
        raise EvaluationError(f"data={str(folder)!r} is not a folder. It should hold files named <task>.jsonl.")
    known = [task.name for task in paper_tasks()]
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    for name in files:
        if name not in known:  # most likely a slip: the task would be left out without a word
            raise unknown(f"the name of a file in data={str(folder)!r}", name, known)
    found = {task.name: files[task.name] for task in tasks if task.name in files}
    if not found:
        expected = ", ".join(f"{task.name}.jsonl" for task in tasks)
        raise EvaluationError(f"data={str(folder)!r} has no file of these tasks. It may have: {expected}.")
    return found


def load_from_file(manager: Any, task: PaperTask, path: Path) -> Any:
    """The harness's task with the rows of a local file in the public dataset's format."""
    config = manager.task_index[task.name].cfg
    # The harness scores the test split if the dataset has one, and the validation split otherwise.
    split = config.get("test_split") or config.get("validation_split") or "validation"
    overrides = {name: split if config.get(name) == split else None for name in ("test_split", "validation_split")}
    local_class = _with_rows(_class_of(config, task), {split: read_rows(path, task)})
    member = {"task": task.name, "class": local_class, "training_split": None, **overrides}
    # A group is the harness's way to change a known task's configuration; it is opened again at once.
    return manager.load({"group": "local_files", "task": [member]})["tasks"][task.name]


def read_rows(path: Path, task: PaperTask) -> Any:
    """The rows of a file as a `datasets.Dataset` of the columns the task reads, with the public dataset's types.

    The types are given, not guessed: the JSON loader of `datasets` turns a column of dates into time stamps.
    """
    import datasets

    # Not str.splitlines: a text may contain other marks that it takes for the end of a line.
    with path.open(encoding="utf-8") as file:
        try:
            rows = [_read_row(line, f"{path}, line {n}", task) for n, line in enumerate(file, start=1) if line.strip()]
        except UnicodeDecodeError as error:
            raise EvaluationError(f"{path} is not UTF-8 ({error}).") from error
    if not rows:
        raise EvaluationError(f"{path} has no rows. It should have one JSON object a line.")
    features = datasets.Features({name: _feature(kind) for name, kind in task.columns.items()})
    return datasets.Dataset.from_list(rows, features=features)


def _read_row(line: str, place: str, task: PaperTask) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise EvaluationError(f"{place}: not JSON ({error}). Each line should be one JSON object.") from error
    if not isinstance(row, dict):
        raise EvaluationError(f"{place}: not a JSON object but {line.strip()[:40]!r}.")
    for name, kind in task.columns.items():
        if not _fits(row.get(name), kind):
            found = json.dumps(row[name])[:80] if name in row else "absent"
            raise EvaluationError(
                f"{place}: the column {name!r} is {found}; it should be of type {kind}. "
                f"Task {task.name!r} reads the columns {', '.join(task.columns)}."
            )
    return {name: row[name] for name in task.columns}


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type of the YAML files: `datasets` would make the text "['a']" of a list."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_fits(value.get(name), inner) for name, inner in kind.items())
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(item, kind[0]) for item in value)
    return type(value) is {"string": str, "int64": int}[kind]


def _feature(kind: Any) -> Any:
    """A type of the YAML files (`string`, `[string]`, `{text: [string]}`) as one of `datasets`."""
    import datasets

    if isinstance(kind, dict):
        return {name: _feature(inner) for name, inner in kind.items()}
    if isinstance(kind, list):
        return datasets.List(_feature(kind[0]))
    return datasets.Value(kind)


def _class_of(config: dict[str, Any], task: PaperTask) -> Any:
    """The Python class behind a task: most are plain configuration, a few name a class of their own."""
    import lm_eval.api.task

    if "class" not in config:
        return lm_eval.api.task.ConfigurableTask
    # The index has it as a path, …/swde/task.SWDE, not yet imported.
    module, _, name = Path(config["class"]).name.rpartition(".")
    folder = str(task.folder).replace("/", ".")
    return getattr(importlib.import_module(f"lm_eval.tasks.{folder}.{module}"), name)


def _with_rows(original: Any, splits: dict[str, Any]) -> type:
    """The same task class, with these rows in place of a download."""

    def initialise(self: Any, config: dict[str, Any]) -> None:
        original.__init__(self, config={name: value for name, value in config.items() if name != "class"})

    def download(self: Any, *arguments: Any, **keywords: Any) -> None:
        self.dataset = splits

    return type(original.__name__, (original,), {"__init__": initialise, "download": download})
