"""The application that the commands register with, and what they share."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import typer
from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Column, Table
from transformers.utils import logging as transformers_logging

app = typer.Typer(help="Sequence models that learn while they read.", no_args_is_help=True, add_completion=False)
evaluations = typer.Typer(help="Measure a saved model.", no_args_is_help=True)
app.add_typer(evaluations, name="eval")
console = Console()


@app.callback()
def prepare() -> None:
    """Sequence models that learn while they read."""
    transformers_logging.disable_progress_bar()  # of loading and saving, which take no time a person would notice
    # Large tensors on large pages, where the system has them: handing out small ones is a seventh of a training step.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def wide_table(columns: Sequence[str], title: str | None = None) -> Table:
    """Of many columns: where the terminal is narrow, all but the first are broken, and nothing is left out."""
    first, *others = columns
    folded = (Column(name, overflow="fold") for name in others)
    return Table(Column(first, no_wrap=True), *folded, title=title, box=box.SIMPLE, pad_edge=False)


def names(text: str) -> tuple[str, ...]:
    """Of a list with commas, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def refused(error: Exception) -> typer.Exit:
    """Say what was wrong with the request, and end with the code for that."""
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(code=2)


def speak() -> None:
    """What the loop has to say goes to the terminal, above the progress bar."""
    logger = logging.getLogger("atlas_memory")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(RichHandler(console=Console(stderr=True), show_path=False))
