"""The paper's evaluation as data: which tasks make a group, and what each shows and reads (`harness/*.yaml`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HARNESS_FOLDER = Path(__file__).parent / "harness"
GROUPS = ("common_sense", "recall")
ALL = "all"


class EvaluationError(RuntimeError):
    """Something the person who asked for the evaluation can put right; the message says how."""


@dataclass(frozen=True)
class PaperTask:
    """One task: its name in the harness, and what is shown of it."""

    name: str
    group: str
    metrics: list[str]
    columns: dict[str, Any]  # of the public dataset, those that are read → their types
    folder: str | None = None  # in the harness; None: in HARNESS_FOLDER
    generation: dict[str, Any] | None = None  # how to generate; None: as the harness's file says


def unknown(argument: str, value: str, known: Iterable[str]) -> EvaluationError:
    """The error for a name that is none of `known`, with the nearest ones."""
    known = list(known)
    near = difflib.get_close_matches(value, known, n=3, cutoff=0.4)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    return EvaluationError(f"{argument}={value!r} is unknown.{hint} Known: {', '.join(known)}.")


def paper_tasks(group: str = ALL) -> list[PaperTask]:
    """The tasks of one group, or of all, in the order of the files."""
    if group not in (*GROUPS, ALL):
        raise unknown("group", group, (*GROUPS, ALL))
    return [task for name in GROUPS if group in (name, ALL) for task in _read_group(name)]


def _read_group(name: str) -> list[PaperTask]:
    # PyYAML comes with the harness, and only the harness needs these files.
    import yaml

    content = yaml.safe_load((HARNESS_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    details = content["metadata"]["tasks"]
    return [PaperTask(name=task, group=name, **details[task]) for task in content["task"]]
