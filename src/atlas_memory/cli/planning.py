"""What training costs before it is started."""

from __future__ import annotations

from typing import Annotated

import typer

from atlas_memory.cli.application import app, console, refused, wide_table
from atlas_memory.models.accounting import SIZES
from atlas_memory.train import load_recipe, scaling
from atlas_memory.train.hardware import HARDWARE, THIS_MACHINE, find_hardware


@app.command()
def scale(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a shipped recipe.")] = "paper-340m",
    size: Annotated[
        list[str] | None, typer.Option(help=f"Instead of the recipe's model; may be repeated: {', '.join(SIZES)}.")
    ] = None,
    accelerators: Annotated[list[int] | None, typer.Option(help="How many; may be repeated.", min=1)] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"{' or '.join(scaling.STRATEGIES)}; may be repeated.")
    ] = None,
    hardware: Annotated[str, typer.Option(help=f"One of {', '.join([*HARDWARE, THIS_MACHINE])}.")] = "a100-80",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the recipe, as loop.rows_per_pass=16.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for documents.")] = False,
) -> None:
    """Predict memory, communication and time of a training step on many accelerators.

    Example: atlas-memory scale quick --accelerators 1 --accelerators 8 --hardware h100
    """
    try:
        rows = scaling.table(
            load_recipe(recipe, changes or []),
            size or [],
            accelerators or [8],
            strategy or ["ddp"],
            find_hardware(hardware),
        )
        if markdown:
            for cells in (scaling.COLUMNS, ("---",) * len(scaling.COLUMNS), *rows):
                typer.echo(f"| {' | '.join(cells)} |")
            return
        shown = wide_table(("", *("" for _ in rows)), f"{recipe} on {hardware}")
        for quantity in zip(scaling.COLUMNS, *rows, strict=True):  # a column for each prediction: there are few
            shown.add_row(*quantity)
    except ValueError as error:
        raise refused(error) from error
    console.print(shown)
