"""The command line: parses, calls, prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from atlas_memory.data import SourceConfig, load_tokenizer, read_documents, train_tokenizer
from atlas_memory.data.tokenizers import check_trainable, pieces
from atlas_memory.demonstration import read_stream
from atlas_memory.models.accounting import SIZES, account, sized_config
from atlas_memory.models.configuration_atlas import BACKBONES, AtlasConfig
from atlas_memory.spec import presets
from atlas_memory.tasks import command, paper

app = typer.Typer(help="Sequence models that learn while they read.", no_args_is_help=True, add_completion=False)
evaluations = typer.Typer(help="Measure a saved model.", no_args_is_help=True)
app.add_typer(evaluations, name="eval")
command.add_to(evaluations)
tokenizers = typer.Typer(help="Train a tokenizer, or look at one.", no_args_is_help=True)
app.add_typer(tokenizers, name="tokenizer")
console = Console()


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(help="Length of the stream.", min=1)] = 1_000_000,
    preset: Annotated[
        str, typer.Option(help="A memory of the regression kind: see `atlas-memory presets`.")
    ] = "titans",
) -> None:
    """Read a long stream, and ask for facts told at its start.

    Example: atlas-memory demo --tokens 200000 --preset gated_deltanet
    """
    table = Table(
        "tokens read", "state", "tokens/s", "facts recalled", title=f"{preset}: 32 facts, then background only"
    )
    bar = Progress(TextColumn("reading"), BarColumn(), TextColumn("{task.completed:,} tokens"), TimeRemainingColumn())
    shown = 0
    with bar:
        task = bar.add_task("reading", total=tokens)
        for progress in read_stream(preset, tokens):
            bar.update(task, completed=progress.tokens)
            if progress.tokens >= 4 * shown or progress.tokens == tokens:
                shown = progress.tokens
                table.add_row(
                    f"{progress.tokens:,}",
                    f"{progress.state_bytes:,} bytes",
                    f"{progress.tokens_per_second:,.0f}",
                    f"{progress.recalled:.0%}",
                )
    console.print(table)


@app.command("presets")
def list_presets() -> None:
    """The family: every preset and its choices.

    Example: atlas-memory presets
    """
    fields = ("feature", "network", "objective", "window", "optimizer", "exact")
    table = Table("preset", *fields)
    for name, spec in presets.items():
        table.add_row(name, *(str(getattr(spec, field)) for field in fields))
    console.print(table)


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
    try:
        if out is not None:
            paper.check_output(out)
        report = paper.evaluate(paper.Request(model, group, data, limit, batch_size, device, max_length))
    except paper.EvaluationError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(code=2) from error
    console.print(_score_table(report))
    if report.left_out:
        console.print(f"No file in {data} for: {', '.join(report.left_out)}.", markup=False)
    if out is not None:  # last: where the disk is full, the table has been seen
        paper.write_json(out, report.to_dict())


def _score_table(report: paper.Report) -> Table:
    table = Table("task", "metric", "score", "± error", "rows", title=f"Scores of {report.model}")
    averages = report.averages()
    for group in paper.GROUPS:
        for score in (score for score in report.scores if score.group == group):
            error = "" if score.standard_error is None else f"{score.standard_error:.4g}"
            table.add_row(score.task, score.metric, f"{score.value:.4g}", error, f"{score.rows:,}")
        if group in averages:
            table.add_row(f"{group}: average", "accuracy", f"{averages[group]:.4g}", "", "", style="bold")
        table.add_section()
    return table


@app.command()
def info(
    preset: Annotated[str, typer.Option(help="The memory: see `atlas-memory presets`.")] = "atlas",
    backbone: Annotated[str, typer.Option(help=f"One of {', '.join(BACKBONES)}.")] = "mag",
    size: Annotated[str | None, typer.Option(help=f"A named size instead of widths: {', '.join(SIZES)}.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the feed-forward layers.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    window: Annotated[int | None, typer.Option(help="Window of attention.")] = None,
    segment: Annotated[int | None, typer.Option(help="Segment of mac.")] = None,
    memory_heads: Annotated[int | None, typer.Option(help="Heads of the memory.")] = None,
    memory: Annotated[
        list[str] | None, typer.Option(help="A field of the memory, as chunk=32; may be repeated.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens the FLOPs are an average over.", min=1)] = 1024,
) -> None:
    """What a model costs: parameters, state, FLOPs.

    Example: atlas-memory info --preset atlas --backbone mag --hidden 1536 --layers 24
    """
    given = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "sliding_window": window,
        "segment_length": segment,
        "memory_heads": memory_heads,
        "memory": dict(_field(text) for text in memory or []),
    }
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        if size is not None and intermediate is not None:
            raise ValueError("intermediate is fitted to the size: give --size or --intermediate.")
        fields |= {"preset": preset, "backbone": backbone}
        config = AtlasConfig(**fields) if size is None else sized_config(size, **fields)
        costs = account(config, context)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    title = f"{preset} in {backbone}: {config.num_hidden_layers} layers of {config.hidden_size}"
    table = Table("cost", "", title=title)
    for name, value in costs.rows():
        table.add_row(name, value)
    console.print(table)


def _field(text: str) -> tuple[str, Any]:
    """name=value, the value as in JSON, or else as it stands."""
    name, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"memory={text!r} must be name=value, such as chunk=32.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


@tokenizers.command("train")
def tokenizer_train(
    source: Annotated[
        str, typer.Option(help="builtin, text:PATH, jsonl:PATH, datasets:NAME, or a file, folder or glob.")
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the tokenizer.")],
    vocabulary: Annotated[int, typer.Option(help="Tokens at most, special ones included.")] = 4096,
    field: Annotated[str, typer.Option(help="jsonl, datasets: which field holds the text.")] = "text",
    limit: Annotated[int | None, typer.Option(help="Documents at most.")] = None,
    validation: Annotated[float, typer.Option(help="Share of documents held out, as in training.")] = 0.05,
) -> None:
    """Train a byte-level BPE tokenizer on the training documents of a source.

    Example: atlas-memory tokenizer train --source builtin --vocabulary 4096 --out my-tokenizer
    """
    try:
        check_trainable(vocabulary, out)
        documents = read_documents(SourceConfig.parse(source, field=field, limit=limit), "train", validation)
        tokenizer = train_tokenizer((document.text for document in documents), vocabulary, out)
    except (ValueError, ImportError, OSError) as error:
        raise _refused(error) from error
    console.print(f"{len(tokenizer):,} tokens in {out}", markup=False)


@tokenizers.command("show")
def tokenizer_show(
    name: Annotated[str, typer.Argument(help="bytes, a folder, or a name on the hub.")],
    text: Annotated[str, typer.Option(help="What to split.")] = "A memory that learns while it reads.",
) -> None:
    """What a tokenizer makes of a text.

    Example: atlas-memory tokenizer show bytes --text "naïve"
    """
    try:
        tokenizer = load_tokenizer(name)
    except (ValueError, ImportError) as error:
        raise _refused(error) from error
    split = pieces(tokenizer, text)
    table = Table("token", "id")
    for token, piece in split:
        table.add_row(escape(repr(piece)), str(token))
    console.print(table)
    console.print(f"{name}: {len(tokenizer):,} tokens, a document ends with {tokenizer.eos_token}", markup=False)
    console.print(f"{len(text.encode()) / max(len(split), 1):.2f} bytes a token")


def _refused(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(code=2)
