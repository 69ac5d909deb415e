"""The command line: parses, calls, prints."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from atlas_memory.demonstration import read_stream
from atlas_memory.spec import presets

app = typer.Typer(help="Sequence models that learn while they read.", no_args_is_help=True, add_completion=False)
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
