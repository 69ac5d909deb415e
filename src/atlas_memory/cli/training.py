"""Training models, and looking at runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from atlas_memory.cli.application import app, console, refused, speak, wide_table
from atlas_memory.train import DivergedError, load_recipe, plot, runs, shipped_recipes
from atlas_memory.train import train as run_training


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help=f"A YAML file, or one of {', '.join(shipped_recipes())}.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the trained model will be in OUT/final.")],
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's loop.steps.", min=1)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint in OUT.")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the recipe, as optimizer.lr=3e-4; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Train a model by a recipe. On many processes: torchrun --nproc-per-node 8 -m atlas_memory train ...

    Example: atlas-memory train quick --out runs/quick --steps 20 --set optimizer.lr=1e-3
    """
    speak()
    overrides = [*(changes or []), *([] if steps is None else [f"loop.steps={steps}"])]
    try:
        final = run_training(load_recipe(recipe, overrides), out, resume=resume, progress=not quiet)
    except (ValueError, ImportError, OSError) as error:
        raise refused(error) from error
    except DivergedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(code=1) from error
    if os.environ.get("RANK", "0") == "0":  # of many processes, one speaks
        console.print(f"The model is in {final}", markup=False)


@app.command("runs")
def list_runs(
    folders: Annotated[list[Path], typer.Argument(help="Runs, or folders that hold runs.")],
    compare: Annotated[bool, typer.Option("--compare", help="Also show where the recipes differ.")] = False,
) -> None:
    """List runs, and compare them.

    Example: atlas-memory runs runs --compare
    """
    try:
        found = runs.find(folders)
    except ValueError as error:
        raise refused(error) from error
    table = wide_table(runs.COLUMNS)
    for run in found:
        table.add_row(*map(escape, run.row()))
    console.print(table)
    if compare:
        differing = wide_table(["field", *(escape(run.name) for run in found)])
        for field, values in runs.differing_fields(found):
            differing.add_row(escape(field), *(escape(str(value)) for value in values))
        console.print(differing)


@app.command("plot")
def plot_runs(
    folders: Annotated[list[Path], typer.Argument(help="Runs, or folders that hold runs.")],
    out: Annotated[Path, typer.Option(help="PNG file.")] = Path("curves.png"),
    quantity: Annotated[
        list[str] | None, typer.Option(help="What to draw, a name of the log; may be repeated. Default: losses, lr.")
    ] = None,
) -> None:
    """Draw the curves of runs to a PNG file.

    Example: atlas-memory plot runs --out curves.png --quantity loss
    """
    try:
        plot.draw(runs.find(folders), out, quantity or list(plot.DEFAULT))
    except (ValueError, ImportError, OSError) as error:
        raise refused(error) from error
    console.print(f"The curves are in {out}", markup=False)
