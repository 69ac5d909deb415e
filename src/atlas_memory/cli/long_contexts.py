"""`atlas-memory eval babilong|niah|mqar|mad`: what the four have in common, and their options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from atlas_memory.cli.application import console, evaluations, names, refused
from atlas_memory.files import check_output, write_json
from atlas_memory.models.shipped import SHIPPED
from atlas_memory.tasks import figures, mad, mqar, needle
from atlas_memory.tasks.babilong import stream
from atlas_memory.tasks.babilong.facts import SIMULATOR, TASKS
from atlas_memory.tasks.background import BUILTIN
from atlas_memory.tasks.evaluation import Request, evaluate, finished_report, load_report
from atlas_memory.tasks.lengths import parse_counts
from atlas_memory.tasks.merging import merge
from atlas_memory.tasks.precision import AUTO, PRECISIONS, chosen_precision
from atlas_memory.tasks.results import Report
from atlas_memory.tasks.samples import Cell
from atlas_memory.tasks.work import settings_before

Model = Annotated[
    Path, typer.Option(help=f"Folder of a model and its tokenizer, or one of {', '.join(SHIPPED)}.", metavar="PATH")
]
Out = Annotated[Path, typer.Option(help="JSON file for the results; a figure is written beside it.")]
Samples = Annotated[int, typer.Option(help="Samples of each task and length.")]
Batch = Annotated[int, typer.Option(help="Samples read side by side.")]
Precision = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(PRECISIONS)}, or {AUTO}: what is faster here. Memories stay in float32.",
        metavar="NAME",
    ),
]
Seed = Annotated[int, typer.Option(help="The same seed gives every model the same samples.")]
Lengths = Annotated[str, typer.Option(help="Lengths in GPT-2 tokens (4.2 characters), such as 0k,4k,128k,1M,10M.")]
Scale = Annotated[str, typer.Option(help=f"One of {', '.join(mqar.SCALES)}.")]
SamplesOrAll = Annotated[int | None, typer.Option(help="Samples of each setting; as many as the scale says if absent.")]
TokenModel = Annotated[
    Path, typer.Option(help="Folder of a model trained for these token ids: see `atlas-memory study`.", metavar="PATH")
]
Again = Annotated[bool, typer.Option("--again", help="Evaluate also if OUT is there already, and replace it.")]
Paths = "a folder, a glob or a list with commas"
FIGURE = ".png"


@evaluations.command()
def babilong(
    model: Model,
    out: Out,
    lengths: Lengths = "0k,4k",
    samples: Samples = 100,
    batch: Batch = 8,
    precision: Precision = AUTO,
    seed: Seed = 0,
    tasks: Annotated[str, typer.Option(help=f"Some of {', '.join(TASKS)}.")] = ",".join(TASKS[:5]),
    facts: Annotated[str, typer.Option(help=f"simulator, or bAbI files: {Paths}.")] = SIMULATOR,
    background: Annotated[str, typer.Option(help=f"builtin, or text files: {Paths}.")] = BUILTIN,
    first: Annotated[int, typer.Option(help="Number of the first sample, to share the samples among machines.")] = 0,
    again: Again = False,
) -> None:
    """BABILong: facts scattered over a long text, a question at its end. Goes on where it was stopped.

    Example: atlas-memory eval babilong --model shipped --lengths 0k,4k --tasks qa1,qa2 --out babilong.json

    Shared out: samples 0 to 19 here, 20 to 39 there with --first 20, and then `atlas-memory eval merge`.
    """
    settings = {"lengths": lengths, "tasks": tasks, "samples": samples, "first": first, "seed": seed}
    settings |= {"facts": facts, "background": background}

    def cells() -> list[Cell]:
        return stream.cells(parse_counts("lengths", lengths), samples, seed, names(tasks), facts, background, first)

    _run("babilong", model, out, batch, precision, settings, cells, again)


@evaluations.command()
def niah(
    model: Model,
    out: Out,
    lengths: Lengths = "2k,4k,8k,16k",
    samples: Samples = 10,
    batch: Batch = 8,
    precision: Precision = AUTO,
    seed: Seed = 0,
    tasks: Annotated[str, typer.Option(help=f"Some of {', '.join(needle.TASKS)}.")] = ",".join(needle.TASKS),
    background: Annotated[str, typer.Option(help=f"builtin, or text files: {Paths}.")] = BUILTIN,
    depths: Annotated[str, typer.Option(help="Where the needle is: 0 the start of the text, 1 its end.")] = ",".join(
        f"{depth:g}" for depth in needle.DEPTHS
    ),
    again: Again = False,
) -> None:
    """RULER's single needles in a haystack, depth by length. Goes on where it was stopped.

    Example: atlas-memory eval niah --model my-model --lengths 2k,4k --samples 5 --out niah.json
    """
    settings = {"lengths": lengths, "tasks": tasks, "samples": samples, "seed": seed}
    settings |= {"background": background, "depths": depths}

    def cells() -> list[Cell]:
        chosen = tuple(dict.fromkeys(_number("depths", depth) for depth in names(depths)))
        return needle.cells(parse_counts("lengths", lengths), samples, seed, names(tasks), background, chosen)

    _run("niah", model, out, batch, precision, settings, cells, again)


@evaluations.command("mqar")
def recall(
    model: TokenModel,
    out: Out,
    lengths: Annotated[str | None, typer.Option(help="Lengths in tokens, such as 64,256; all if absent.")] = None,
    samples: SamplesOrAll = None,
    batch: Batch = 32,
    precision: Precision = PRECISIONS[0],
    seed: Seed = 0,
    scale: Scale = "small",
    again: Again = False,
) -> None:
    """Multi-query associative recall, on a model trained for it (token ids, no tokenizer).

    Example: atlas-memory eval mqar --model my-mqar-model --lengths 64,128 --out mqar.json
    """
    settings = {"lengths": lengths, "samples": samples, "seed": seed, "scale": scale}

    def cells() -> list[Cell]:
        return mqar.cells(None if lengths is None else parse_counts("lengths", lengths), samples, seed, scale)

    _run("mqar", model, out, batch, precision, settings, cells, again)


@evaluations.command("mad")
def skills(
    model: TokenModel,
    out: Out,
    tasks: Annotated[str, typer.Option(help=f"Some of {', '.join(mad.TASKS)}.", show_default=False)] = ",".join(
        mad.SCORED
    ),
    lengths: Annotated[
        str | None, typer.Option(help="Lengths in tokens, such as 64,256; the task's if absent.")
    ] = None,
    samples: SamplesOrAll = None,
    batch: Batch = 32,
    precision: Precision = PRECISIONS[0],
    seed: Seed = 0,
    scale: Scale = "small",
    again: Again = False,
) -> None:
    """MAD's tasks, on a model trained for them (token ids, no tokenizer).

    Example: atlas-memory eval mad --model my-mad-model --tasks in_context_recall --out mad.json
    """
    settings = {"tasks": tasks, "lengths": lengths, "samples": samples, "seed": seed, "scale": scale}

    def cells() -> list[Cell]:
        chosen = None if lengths is None else parse_counts("lengths", lengths)
        return mad.cells(samples, seed, names(tasks), scale, chosen)

    _run("mad", model, out, batch, precision, settings, cells, again)


@evaluations.command("merge")
def merge_reports(
    files: Annotated[list[Path], typer.Argument(help="Results of the evaluations above, of one model.")],
    out: Out,
    again: Annotated[bool, typer.Option("--again", help="Replace OUT if it is there already.")] = False,
) -> None:
    """Put results together: other tasks and lengths, or further samples of the same (babilong --first).

    Example: atlas-memory eval merge here.json there.json --out both.json
    """
    try:
        _check_out(out)
        report = merge([load_report(file) for file in files])
        if not _holds(out, report):
            _check_free(out, again)
            write_json(out, report.to_dict())
    except (ValueError, OSError) as error:
        raise refused(error) from error
    _show(report, out)


def _holds(out: Path, report: Report) -> bool:
    """Whether it is there already."""
    try:
        return load_report(out) == report
    except (ValueError, OSError):
        return False


def _number(argument: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{argument}: {text!r} is not a number; accepted: such as 0,0.5,1.") from error


def _run(
    name: str,
    model: Path,
    out: Path,
    batch: int,
    precision: str,
    settings: dict[str, Any],
    cells: Callable[[], list[Cell]],
    again: bool,
) -> None:
    try:
        _check_out(out)
        precision = chosen_precision(precision, settings_before(out).get("precision"))
        request = Request(name, model, cells(), out, settings, batch, precision=precision)
        report = None if again else finished_report(request)
        if report is None:
            _check_free(out, again)
            report = evaluate(request)
        else:
            typer.echo(f"{out} has these results already; --again evaluates once more.", err=True)
    except (ValueError, OSError) as error:
        raise refused(error) from error
    _show(report, out)


def _check_free(out: Path, again: bool) -> None:
    """Results of something else are replaced when that is asked for, and a figure that has none never."""
    if out.exists() and not again:
        raise ValueError(f"out={str(out)!r} holds something else; --again replaces it.")
    figure = out.with_suffix(FIGURE)
    if figure.exists() and not out.exists():
        raise ValueError(f"out={str(out)!r}: its figure would replace {str(figure)!r}; choose another name.")


def _check_out(out: Path) -> None:
    if out.suffix == FIGURE:
        raise ValueError(f"out={str(out)!r} is where the figure goes; name the results, such as results.json.")
    check_output(out)
    figure = out.with_suffix(FIGURE)
    if figure.is_dir():
        raise ValueError(
            f"out={str(out)!r}: the figure goes to {str(figure)!r}, which is a folder; choose another name."
        )


def _show(report: Report, out: Path) -> None:
    """The table, and the figure beside the results."""
    console.print(report.table())
    try:
        figures.draw(report, out.with_suffix(FIGURE))
    except ImportError as error:  # the numbers are there; a figure is a convenience
        typer.echo(str(error), err=True)
