"""Options of documents to learn from, and a curriculum: options that change from some document on, and stay changed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

from atlas_memory.checks import check_choice, check_whole
from atlas_memory.data.options import check_text
from atlas_memory.tasks.background import BUILTIN

BEGIN = "from"  # which document a stage holds from


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Which documents: each draws a task and a length. PATHS: a folder, a glob or a list with commas.

    stages: ({"from": document number, "lengths": ...}, ...), of the options that STAGED names.
    """

    TASKS: ClassVar[tuple[str, ...]]
    STAGED: ClassVar[tuple[str, ...]]

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = (0,)  # GPT-2-equivalent tokens
    stages: tuple[dict[str, Any], ...] = ()
    background: str = BUILTIN  # or PATHS of text files
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", _listed("tasks", self.tasks, f"[{', '.join(self.TASKS[:2])}]"))
        for task in self.tasks:
            check_choice("task", task, self.TASKS)
        object.__setattr__(self, "lengths", _listed("lengths", self.lengths, "[0, 4000]"))
        for length in self.lengths:
            check_whole("length in lengths", length, least=0)
        check_text("background", self.background)
        check_whole("seed", self.seed, least=0)
        object.__setattr__(self, "stages", _checked_stages(self.stages, self.STAGED))
        if self.stages:
            list(self.over_time())  # each is checked as it is made

    def over_time(self) -> Iterator[tuple[int, Self]]:
        """From which document on what holds."""
        options = dataclasses.replace(self, stages=())
        yield 0, options
        for stage in self.stages:
            changes = {name: value for name, value in stage.items() if name != BEGIN}
            options = dataclasses.replace(options, **changes)
            yield stage[BEGIN], options

    def at(self, number: int) -> Self:
        return [options for begin, options in self.over_time() if begin <= number][-1]


def _checked_stages(stages: Any, known: Sequence[str]) -> tuple[dict[str, Any], ...]:
    accepted = f"stages={stages!r} must be a list such as [{{{BEGIN}: 1000, lengths: [0, 4000]}}], with rising numbers."
    if not isinstance(stages, list | tuple) or not all(isinstance(stage, dict) and BEGIN in stage for stage in stages):
        raise ValueError(accepted)
    for stage in stages:
        check_whole(f"{BEGIN} in stages", stage[BEGIN], least=0)
        for name in stage:
            check_choice("option of a stage", name, (BEGIN, *known))
    begins = [stage[BEGIN] for stage in stages]
    if begins != sorted(set(begins)):
        raise ValueError(accepted)
    return tuple(stages)


def _listed(name: str, value: Any, example: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name}={value!r} must be a list of one or more, such as {example}.")
    return tuple(value)


def check_number(name: str, value: Any, most: float = sys.float_info.max) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        upper = f" and at most {most}" if most < sys.float_info.max else ""
        raise ValueError(f"{name}={value!r} must be a number of at least 0{upper}.")
