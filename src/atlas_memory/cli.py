"""The command line: parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from atlas_memory.data import SourceConfig, load_tokenizer, read_documents, train_tokenizer
from atlas_memory.data.tokenizers import check_trainable, pieces
from atlas_memory.demonstration import read_stream
from atlas_memory.spec import presets

app = typer.Typer(help="Sequence models that learn while they read.", no_args_is_help=True, add_completion=False)
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
