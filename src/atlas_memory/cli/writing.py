"""What a model's memory takes from a text."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from atlas_memory.cli.application import app, console, refused, wide_table
from atlas_memory.cli.long_contexts import Model, Paths
from atlas_memory.data import load_tokenizer
from atlas_memory.data.options import TEXT_SUFFIXES
from atlas_memory.files import check_output, write_whole
from atlas_memory.models.saved import load_saved
from atlas_memory.models.shipped import model_folder
from atlas_memory.tasks.background import all_sentences
from atlas_memory.tasks.files import find_files
from atlas_memory.tasks.written import Block, Written, find_written


@app.command()
def writes(
    text: Annotated[str, typer.Argument(help=f"Text files: {Paths}.")],
    model: Model = Path("shipped"),
    out: Annotated[Path | None, typer.Option(help="Text file for the passages, a line each.")] = None,
    above: Annotated[float, typer.Option(help="How much must be written in a sentence to count.", min=0)] = 0.0,
    show: Annotated[int, typer.Option(help="So many sentences are shown.", min=0)] = 10,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Sentences of a text in which the memory writes; as a background of lessons, what to learn not to keep.

    Example: atlas-memory writes README.md --model shipped
    """
    try:
        if out is not None:
            check_output(out)
        files = find_files("text", text, TEXT_SUFFIXES)
        folder = model_folder(model)
        network, tokenizer = load_saved(folder), load_tokenizer(folder)
        tokens = 0
        with _bar(quiet) as bar:
            task = bar.add_task("reading", total=sum(file.stat().st_size for file in files))

            def watch(blocks: Sequence[Block]) -> None:
                nonlocal tokens
                tokens += sum(block.tokens for block in blocks)
                bar.advance(task, sum(len(sentence) + 1 for block in blocks for sentence in block.sentences))

            found = list(find_written(network, tokenizer, all_sentences(files), above, watch))
            bar.update(task, completed=bar.tasks[task].total)
        if out is not None:
            if not found:  # a background of no sentences would stop the training that comes next
                raise ValueError(
                    f"out={str(out)!r} would be empty: of the {tokens:,} tokens of {text!r} the model wrote nothing "
                    f"above {above:g} to its memory; accepted: other texts, or a lower --above."
                )
            write_whole(out, "".join(f"{written.passage}\n" for written in found))
    except (ValueError, OSError) as error:
        raise refused(error) from error
    _show(found, tokens, show)


def _bar(quiet: bool) -> Progress:
    columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet)


def _show(found: Sequence[Written], tokens: int, number: int) -> None:
    if number and found:
        table = wide_table(("written", "sentence"), title="Where most is written")
        for written in heapq.nlargest(number, found):
            table.add_row(f"{written.amount:.2f}", escape(written.sentence))
        console.print(table)
    total = sum(written.amount for written in found)
    console.print(f"{tokens:,} tokens; {len(found):,} sentences with {total:,.1f} written in them.")
