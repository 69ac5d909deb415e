"""Run the paper's evaluation on a saved model, through lm-evaluation-harness."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas_memory.tasks.paper.groups import ALL, EvaluationError, PaperTask, paper_tasks
from atlas_memory.tasks.paper.loading import find_files, load_from_file, load_from_hub, task_manager
from atlas_memory.tasks.paper.report import Report, scores_of

# Drawn only for the standard error of a perplexity; every other error has a closed form.
BOOTSTRAP_SAMPLES = 1000

# Packages a score depends on.
VERSIONED = ("atlas-memory", "lm_eval", "transformers", "torch")


@dataclass(frozen=True)
class Request:
    """What to evaluate, and how. Checked as it is made, before any work."""

    model: Path  # a folder written by save_pretrained, with its tokenizer
    group: str = ALL
    data: Path | None = None  # a folder of <task>.jsonl files; None: the hub
    limit: int | None = None  # rows per task
    batch_size: str = "1"  # a number, or "auto"
    device: str | None = None
    max_length: int | None = None  # tokens; None: what the model's configuration says
    tasks: tuple[PaperTask, ...] = field(init=False)

    def __post_init__(self) -> None:
        require_harness()
        object.__setattr__(self, "tasks", tuple(paper_tasks(self.group)))
        for file in ("config.json", "tokenizer_config.json"):
            if not (self.model / file).is_file():
                raise EvaluationError(
                    f"model={str(self.model)!r} is not the folder of a model: it has no {file}. "
                    "Pass a folder written by save_pretrained, of the model and of its tokenizer."
                )
        if self.batch_size != "auto" and not (self.batch_size.isdecimal() and int(self.batch_size) > 0):
            raise EvaluationError(f"batch_size={self.batch_size!r} is neither a number from 1 up nor 'auto'.")
        for name in ("limit", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EvaluationError(f"{name}={value} should be 1 or more.")


def require_harness() -> None:
    """An error that says what to install, unless the harness is there."""
    if any(importlib.util.find_spec(name) is None for name in ("lm_eval", "accelerate")):
        raise EvaluationError("lm-evaluation-harness is not installed: pip install 'atlas-memory[eval]'")


def load_tasks(tasks: Sequence[PaperTask], data: Path | None) -> list[Any]:
    """Tasks of the harness, with their rows, in the order given; with `data`, those that have a file there."""
    manager = task_manager(tasks)
    files = None if data is None else find_files(data, tasks)
    loaded = []
    for task in tasks:
        if files is None:
            loaded.append(load_from_hub(manager, task))
        elif task.name in files:
            loaded.append(load_from_file(manager, task, files[task.name]))
        else:
            continue
        if task.generation is not None:
            loaded[-1].set_config(key="generation_kwargs", value=task.generation)
    return loaded


def evaluate(request: Request) -> Report:
    """Score the model on the tasks of the request. The harness shows its progress on standard error."""
    import lm_eval
    import torch

    loaded = load_tasks(request.tasks, request.data)
    arguments: dict[str, Any] = {"pretrained": str(request.model)}
    if request.max_length is not None:
        arguments["max_length"] = request.max_length
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=loaded,
        batch_size=request.batch_size if request.batch_size == "auto" else int(request.batch_size),
        device=request.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        limit=request.limit,
        bootstrap_iters=BOOTSTRAP_SAMPLES,
        log_samples=False,
        task_manager=task_manager(request.tasks),
    )
    names = {task.task_name for task in loaded}
    return Report(
        model=str(request.model),
        group=request.group,
        data=None if request.data is None else str(request.data),
        limit=request.limit,
        scores=scores_of(results, [task for task in request.tasks if task.name in names]),
        left_out=[task.name for task in request.tasks if task.name not in names],
        versions={name: importlib.metadata.version(name) for name in VERSIONED},
    )
