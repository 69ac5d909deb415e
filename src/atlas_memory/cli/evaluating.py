"""Measuring saved models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from atlas_memory.cli.application import console, evaluations, refused
from atlas_memory.data import SourceConfig
from atlas_memory.files import check_output, finite, write_json
from atlas_memory.models.shipped import model_folder
from atlas_memory.tasks import lm, paper


@evaluations.command("paper")
def evaluate_paper(
    model: Annotated[Path, typer.Option(help="Folder written by save_pretrained: the model and its tokenizer.")],
    group: Annotated[str, typer.Option(help=f"One of {', '.join((*paper.GROUPS, paper.ALL))}.")] = paper.ALL,
    data: Annotated[Path | None, typer.Option(help="Folder of <task>.jsonl files; without it, the hub.")] = None,
    limit: Annotated[int | None, typer.Option(help="Rows per task; all of them unless given.")] = None,
    batch_size: Annotated[str, typer.Option(help="A number, or auto.")] = "1",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …; a GPU if there is one.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest input in tokens; else as the model says.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the scores.")] = None,
) -> None:
    """The ATLAS paper's evaluation: language modelling and common sense, and recall from a document.

    Example: atlas-memory eval paper --model my-model --group recall --out scores.json
    """
    _check(out)
    try:
        report = paper.evaluate(paper.Request(model, group, data, limit, batch_size, device, max_length))
    except paper.EvaluationError as error:
        raise refused(error) from error
    console.print(_score_table(report))
    if report.left_out:
        console.print(f"No file in {data} for: {', '.join(report.left_out)}.", markup=False)
    _write(out, report.to_dict())


def _check(out: Path | None) -> None:
    """Refuse before any work what could not be written after it."""
    try:
        if out is not None:
            check_output(out)
    except ValueError as error:
        raise refused(error) from error


def _write(out: Path | None, content: Any) -> None:
    """Last: where the disk is full, the table has been seen."""
    try:
        if out is not None:
            write_json(out, content)
    except OSError as error:
        raise refused(error) from error


def _score_table(report: paper.Report) -> Table:
    table = Table("task", "metric", "score", "± error", "rows", title=escape(f"Scores of {report.model}"))
    averages = report.averages()
    for group in paper.GROUPS:
        for score in (score for score in report.scores if score.group == group):
            error = "" if score.standard_error is None else f"{score.standard_error:.4g}"
            table.add_row(score.task, score.metric, f"{score.value:.4g}", error, f"{score.rows:,}")
        if group in averages:
            table.add_row(f"{group}: average", "accuracy", f"{averages[group]:.4g}", "", "", style="bold")
        table.add_section()
    return table


@evaluations.command("lm")
def evaluate_lm(
    model: Annotated[Path, typer.Option(help="Folder of a model and its tokenizer, such as OUT/final of `train`.")],
    source: Annotated[
        str, typer.Option(help="builtin, text:PATH, jsonl:PATH, datasets:NAME, or a file, folder or glob.")
    ] = "builtin",
    validation: Annotated[
        float, typer.Option(help="Share of documents held out, as in training: only they are read. 0: all are.")
    ] = 0.0,
    limit: Annotated[int | None, typer.Option(help="Documents at most, before any are held out.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Stop after the batch with which so many are scored.", min=1)
    ] = None,
    rows: Annotated[int, typer.Option(help="Documents read side by side.", min=1)] = 4,
    segment: Annotated[int, typer.Option(help="Tokens read at once.", min=1)] = 512,
    first: Annotated[int, typer.Option(help="Width of the first bucket; each next one is twice as wide.", min=1)] = 128,
    out: Annotated[Path | None, typer.Option(help="JSON file for the numbers.")] = None,
) -> None:
    """Perplexity by position in the document: where it falls with the position, long context is of use.

    Example: atlas-memory eval lm --model runs/quick/final --source builtin --validation 0.02 --tokens 20000
    """
    _check(out)
    try:
        found = lm.evaluate(
            model_folder(model),
            SourceConfig.parse(source, limit=limit),
            validation=validation,
            tokens=tokens,
            rows=rows,
            segment=segment,
            first=first,
        )
    except (ValueError, OSError, ImportError) as error:
        raise refused(error) from error
    table = Table("position", "tokens", "loss", "perplexity", title=escape(f"{model} on {source}"))
    for bucket in found:
        table.add_row(bucket.name, f"{bucket.tokens:,}", f"{bucket.loss:.4f}", f"{bucket.perplexity:.3f}")
    total = lm.total(found)
    table.add_section()
    table.add_row("all", f"{total.tokens:,}", f"{total.loss:.4f}", f"{total.perplexity:.3f}", style="bold")
    console.print(table)
    _write(out, finite([bucket.to_dict() for bucket in found]))
