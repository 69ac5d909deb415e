"""Comparisons of many runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from atlas_memory.cli.application import app, console, refused, speak
from atlas_memory.studies import language_models
from atlas_memory.studies.language_models import MODELS, Study, quick_study, run_study

studies = typer.Typer(help="Train and compare many models.", no_args_is_help=True)
app.add_typer(studies, name="study")
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


@studies.callback()
def _group() -> None:
    """Train and compare many models."""


def count(text: str) -> int:
    """200000, 200k, 2M, 1.5M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower().replace("_", ""))
    if match is None:
        raise ValueError(f"count={text!r} must be a number, such as 200000, 200k or 2M.")
    return round(float(match[1]) * _UNITS[match[2]])


@studies.command("language-models")
def study_language_models(
    out: Annotated[Path, typer.Option(help="Folder of the study; the same folder again goes on with it.")],
    data: Annotated[str | None, typer.Option(help="A folder of texts, or builtin, text:PATH, jsonl:PATH.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Each model reads so many: 2M by default.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each model: 3 by default.", min=1)] = None,
    parameters: Annotated[str | None, typer.Option(help="Of each model: 2.9M by default.")] = None,
    models: Annotated[str | None, typer.Option(help=f"With commas between; all: {','.join(MODELS)}.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A field of every recipe, as optimizer.lr=1e-3.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models on built-in text: does everything run?")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Train members of the family at equal parameters and tokens; a table with deviations, JSON and a figure.

    Example: atlas-memory study language-models --quick --models titans,atlas --out studies/quick
    """
    speak()
    try:
        given: dict[str, Any] = {
            "data": data,
            "tokens": None if tokens is None else count(tokens),
            "seeds": seeds,
            "parameters": None if parameters is None else count(parameters),
            "models": None if models is None else tuple(models.split(",")),
        }
        fields = {name: value for name, value in given.items() if value is not None}
        if not quick and data is None:
            raise ValueError("data must be given: a folder of texts, builtin, text:PATH or jsonl:PATH; or --quick.")
        study = dataclasses.replace(quick_study(), **fields) if quick else Study(**fields)
        study = dataclasses.replace(study, changes=(*study.changes, *(changes or [])))
        run_study(study, out, progress=not quiet)
    except (ValueError, ImportError, OSError) as error:
        raise refused(error) from error
    typer.echo((out / language_models.TABLE).read_text(encoding="utf-8"))
    console.print(f"The study is in {out}", markup=False)
