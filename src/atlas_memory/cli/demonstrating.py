"""`atlas-memory demo`: a million tokens, read once, and questions about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from atlas_memory.cli.application import app, console, refused, speak
from atlas_memory.data.options import TEXT_SUFFIXES
from atlas_memory.demonstration import Answered, Scene, Show
from atlas_memory.demonstration.figures import CURVES, LENGTHS, MEASURED, NEEDLE, SAMPLES, SHIPPED, make_figures
from atlas_memory.demonstration.page import WITH_MEMORY, WITHOUT, numbers, write_page
from atlas_memory.demonstration.scene import needle_cells
from atlas_memory.demonstration.show import Reading
from atlas_memory.files import check_output_folder
from atlas_memory.models.shipped import model_folder
from atlas_memory.tasks.background import BUILTIN
from atlas_memory.tasks.files import find_files
from atlas_memory.tasks.lengths import characters_of, parse_counts
from atlas_memory.tasks.precision import AUTO, chosen_precision
from atlas_memory.train import DivergedError, load_recipe
from atlas_memory.train import train as run_training
from atlas_memory.train.plot import figure_class

RECIPE, RIVAL, PAGE = "demo", "window", "index.html"


@app.command()
def demo(
    book: Annotated[str, typer.Option(help="A text file to hide facts in; builtin: sentences made here.")] = BUILTIN,
    tokens: Annotated[str, typer.Option(help="Length of the text, in tokens of GPT-2.")] = "1M",
    out: Annotated[Path, typer.Option(help="Folder for the page and the figures.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Other facts at other places.", min=0)] = 0,
    model: Annotated[
        str | None, typer.Option(help=f"Folder of another model with a memory; {SHIPPED} unless given.")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Train a small model first, and show that one.")] = False,
) -> None:
    """Hide facts in a long text, read it once in constant memory, and ask for them.

    Example: atlas-memory demo --tokens 20k --out my-demo
    """
    try:
        length = _one_length(tokens)
        if train and model is not None:
            raise ValueError(f"model={model!r} and train must not both be given: the one trained now would be shown.")
        if model == RIVAL:
            raise ValueError(f"model={model!r} has no memory: it is what the demo compares with.")
        _check_folder(out)
        figure_class()  # raises where there could be no figures in the end
        if book != BUILTIN:
            find_files("book", book, TEXT_SUFFIXES)
        scene, needles = Scene(length, book, seed), needle_cells(LENGTHS, SAMPLES, book)
        folder = _trained(out) if train else model_folder(model or SHIPPED)
        precision = chosen_precision(AUTO)
        ours, reading = _read(scene, folder, precision)
        rival = Show(model_folder(RIVAL))
        near = _asked(rival, Scene(0, book, seed))  # the facts alone
        far = _asked(rival, scene, last=round(characters_of(rival.reach)))  # of the text, all that it can see
        answers = list(zip(ours.ask(scene.questions), far, strict=True))
        console.print(_table(answers))
        out.mkdir(parents=True, exist_ok=True)
        drawn = make_figures(folder, needles, out, book, precision)
        write_page(out / PAGE, scene.facts, answers, drawn, numbers(length, ours, reading, rival, near))
    except (ValueError, OSError, ImportError, DivergedError) as error:
        raise refused(error) from error
    console.print(f"Open {out / PAGE} to see it again.", markup=False)


def _check_folder(out: Path) -> None:
    """What an earlier demo has left is replaced, what somebody else has is not."""
    check_output_folder(out)
    foreign = [name for name in (CURVES, NEEDLE, PAGE) if (out / name).exists() and not (out / MEASURED).exists()]
    if foreign:
        raise ValueError(f"out={str(out)!r} holds {', '.join(foreign)}, and not of a demo; choose another folder.")


def _one_length(tokens: str) -> int:
    (length, *others) = parse_counts("tokens", tokens)
    if others or length < 1:
        raise ValueError(f"tokens={tokens!r} must be one length of at least 1.")
    return length


def _trained(out: Path) -> Path:
    speak()
    return run_training(load_recipe(RECIPE), out / "model", resume=True)


def _read(scene: Scene, folder: Path, precision: str) -> tuple[Show, Reading]:
    """Read all of it, showing how."""
    show = Show(folder, precision)
    console.print(
        f"A model of {show.model.num_parameters():,} parameters reads {scene.length:,} tokens; "
        f"{len(scene.facts)} sentences in them are about {len(scene.questions)} people."
    )
    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        TextColumn(
            "{task.completed:,.0f} tokens, {task.fields[speed]:,.0f} a second, state {task.fields[state]:,} bytes"
        ),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    )
    reading = Reading(0, 0, 0, 0)
    with bar:
        task = bar.add_task("reading", total=max(scene.length, 1), speed=0, state=0)
        for reading in show.read(scene):
            speed = reading.gpt2_tokens / max(reading.seconds, 1e-9)
            bar.update(task, completed=reading.gpt2_tokens, speed=speed, state=reading.state_bytes)
    return show, reading


def _asked(show: Show, scene: Scene, last: int | None = None) -> list[Answered]:
    """last: as of `Show.read`."""
    for _ in show.read(scene, last):
        pass
    return show.ask(scene.questions)


def _table(answers: list[tuple[Answered, Answered]]) -> Table:
    table = Table("question", "truth", WITH_MEMORY, WITHOUT)
    for ours, rival in answers:
        said = [Text(a.said or "–", style="green" if a.right else "red") for a in (ours, rival)]
        table.add_row(escape(ours.question.text), escape(ours.question.answer), *said)
    return table
