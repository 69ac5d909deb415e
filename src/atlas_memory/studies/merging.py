"""One study in several sittings or on several machines: the runs of all, in one table and one figure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from atlas_memory.studies import long_texts, token_tasks
from atlas_memory.studies.language_models import FIGURE
from atlas_memory.studies.token_results import Measured, figure
from atlas_memory.tasks.results import DIGEST, PACE, Report, by_content

Content = dict[str, Any]
Name = TypeVar("Name", bound=Hashable)
Run = TypeVar("Run")


def merge(files: Sequence[Path], out: Path) -> None:
    """Write the table, results and figure of all runs in results of `study babilong`, `study mqar` or `study mad`."""
    contents = {file: _read(file) for file in files}
    kinds = {next(kind for kind in KINDS if kind in content) for content in contents.values()}
    if len(kinds) != 1:
        raise ValueError("files: there must be results of one kind of study, of BABILong or of MQAR and MAD.")
    try:
        KINDS[kinds.pop()](list(contents.values()), out)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"files: {', '.join(map(str, files))}: one of them is damaged ({error!r}).") from error


def _read(file: Path) -> Content:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"files: {file} is damaged ({error}).") from error
    if not isinstance(content, dict) or "study" not in content or not any(kind in content for kind in KINDS):
        raise ValueError(f"files: {file} has no results of `study babilong`, `study mqar` or `study mad`.")
    return content


def _merge_long_texts(contents: Sequence[Content], out: Path) -> None:
    studies = [long_texts.Study(**_tuples(content["study"])) for content in contents]
    _check_same(studies, ("models", "seeds", "repeated", "batch", "precision", "facts", "background"))
    reports = _together(
        (name, Report.from_dict(report)) for content in contents for name, report in content[long_texts.REPORTS].items()
    )
    samples = [_samples(report) for report in reports.values()]
    if any(other != samples[0] for other in samples[1:]):
        raise ValueError("files: facts or background are not the same in all; accepted: runs of one study.")
    diverged, notes = (list(_in_order(contents, name)) for name in ("diverged", "notes"))
    study = dataclasses.replace(
        studies[0], models=_all(studies, "models"), seeds=max(study.seeds for study in studies), repeated=None
    )
    out.mkdir(parents=True, exist_ok=True)
    long_texts.write_results(study, reports, diverged, notes, out)


def _merge_token_tasks(contents: Sequence[Content], out: Path) -> None:
    studies = []
    for content in contents:
        fields = _tuples(content["study"])
        studies.append(token_tasks.Study(**fields | {"budget": token_tasks.Budget(**fields["budget"])}))
    _check_same(studies, ("tasks", "models", "key_widths", "seeds"))
    measured = [Measured(**fields) for content in contents for fields in content[token_tasks.TRIALS]]
    found = _together(((run.model, run.task, run.key_width, run.seed), run) for run in measured)
    study = dataclasses.replace(
        studies[0],
        tasks=_all(studies, "tasks"),
        models=_all(studies, "models"),
        key_widths=_all(studies, "key_widths"),
        seeds=max(study.seeds for study in studies),
    )
    out.mkdir(parents=True, exist_ok=True)
    token_tasks.write_results(study, list(found.values()), out)
    figure(list(found.values()), out / FIGURE)


KINDS: Mapping[str, Callable[[Sequence[Content], Path], None]] = {
    long_texts.REPORTS: _merge_long_texts,
    token_tasks.TRIALS: _merge_token_tasks,
}


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """As they were before JSON, which has lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _check_same(studies: Sequence[Any], varying: Sequence[str]) -> None:
    """varying: which runs there are, and what answers do not depend on; of files, what is in them is compared."""
    for study in studies[1:]:
        for field in dataclasses.fields(study):
            one, other = getattr(studies[0], field.name), getattr(study, field.name)
            if field.name not in varying and one != other:
                raise ValueError(f"files: {field.name} is {one!r} in one and {other!r} in another; must be the same.")


def _samples(report: Report) -> dict[str, Any]:
    """What a report's answers depend on besides its model, and the precision it is read in, which the table tells."""
    others = (*PACE, "precision", "model" + DIGEST)
    return {name: value for name, value in by_content(report.settings).items() if name not in others}


def _together(runs: Iterable[tuple[Name, Run]]) -> dict[Name, Run]:
    """Each once; the same run in two files must have the same results."""
    found: dict[Name, Run] = {}
    for name, run in runs:
        if found.setdefault(name, run) != run:
            raise ValueError(f"files: two of them have {name}, with other results; leave one of them out.")
    return found


def _in_order(contents: Sequence[Content], name: str) -> dict[str, None]:
    """Without repetitions."""
    return dict.fromkeys(entry for content in contents for entry in content.get(name, ()))


def _all(studies: Sequence[Any], name: str) -> tuple[Any, ...]:
    """What any of the studies has in this field, in order and without repetitions."""
    return tuple(dict.fromkeys(value for study in studies for value in getattr(study, name)))
