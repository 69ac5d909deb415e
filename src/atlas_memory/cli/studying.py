"""Comparisons of many runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from atlas_memory.checks import check_choice
from atlas_memory.cli.application import app, console, names, refused, speak
from atlas_memory.files import check_output_folder
from atlas_memory.studies import language_models, long_texts, token_tasks
from atlas_memory.studies.language_models import MODELS, Study, quick_study, run_study
from atlas_memory.studies.merging import merge
from atlas_memory.tasks import mad
from atlas_memory.tasks.lengths import parse_count, parse_counts

studies = typer.Typer(help="Train and compare many models.", no_args_is_help=True)
app.add_typer(studies, name="study")


@studies.callback()
def _group() -> None:
    """Train and compare many models."""


@studies.command("language-models")
def study_language_models(
    out: Annotated[Path, typer.Option(help="Folder of the study; the same folder again goes on with it.")],
    data: Annotated[str | None, typer.Option(help="A folder of texts, or builtin, text:PATH, jsonl:PATH.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Each model reads so many: 2M by default.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each model: 3 by default.", min=1)] = None,
    parameters: Annotated[str | None, typer.Option(help="Of each model: 2.9M by default.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Of the tokenizer: 4096 by default.", min=300)] = None,
    models: Annotated[str | None, typer.Option(help=f"With commas between; all: {', '.join(MODELS)}.")] = None,
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
            "tokens": None if tokens is None else parse_count("tokens", tokens),
            "seeds": seeds,
            "parameters": None if parameters is None else parse_count("parameters", parameters),
            "vocabulary": vocabulary,
            "models": None if models is None else names(models),
        }
        fields = {name: value for name, value in given.items() if value is not None}
        if not quick and data is None:
            raise ValueError("data must be given: a folder of texts, builtin, text:PATH or jsonl:PATH; or --quick.")
        study = dataclasses.replace(quick_study(), **fields) if quick else Study(**fields)
        study = dataclasses.replace(study, changes=(*study.changes, *(changes or [])))
        check_output_folder(out)
        run_study(study, out, progress=not quiet)
    except (ValueError, ImportError, OSError) as error:
        raise refused(error) from error
    typer.echo((out / language_models.TABLE).read_text(encoding="utf-8"))
    console.print(f"The study is in {out}", markup=False)


ALL_MODELS, ALL_LONG = ",".join(MODELS), ",".join(long_texts.MODELS)
Models = Annotated[
    str, typer.Option(help=f"With commas between; all unless given: {', '.join(MODELS)}.", show_default=False)
]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Of each model; 1600 (MQAR) or 800 (MAD) of the small scale, as published of the public one.", min=1
    ),
]
Seeds = Annotated[int, typer.Option(help="Runs of each model on each task.", min=1)]
Scale = Annotated[str, typer.Option(help="small (minutes a model) or public.")]
Out = Annotated[Path, typer.Option(help="Folder of the study; the same folder again goes on with it.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


@studies.command("babilong")
def study_babilong(
    out: Out,
    recipe: Annotated[
        str | None, typer.Option(help="A path or a shipped name: how all models are trained; babilong.")
    ] = None,
    models: Annotated[
        str,
        typer.Option(
            help=f"With commas between; all unless given: {', '.join(long_texts.MODELS)}.", show_default=False
        ),
    ] = ALL_LONG,
    seeds: Annotated[int | None, typer.Option(help="Runs of each model; 1 unless given.", min=1)] = None,
    repeated: Annotated[
        str | None, typer.Option(help="Of the models those with all seeds, the others with the first; all of them.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Of the evaluation, with commas between; qa1 to qa5.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Of the evaluation, in GPT-2 tokens; 0k,4k,128k.")] = None,
    samples: Annotated[int | None, typer.Option(help="Of each task and length; 25.", min=1)] = None,
    facts: Annotated[str | None, typer.Option(help="As of eval babilong; simulator.")] = None,
    background: Annotated[str | None, typer.Option(help="As of eval babilong; builtin.")] = None,
    precision: Annotated[str | None, typer.Option(help="Of the evaluation; float32, or bfloat16.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples read side by side; 8 unless given.", min=1)] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the recipe, as loop.steps=500.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few steps, built-in text: does everything run?")] = False,
    quiet: Quiet = False,
) -> None:
    """Train the family on BABILong by one recipe: accuracy by length; a table with intervals, JSON and a figure.

    Example: atlas-memory study babilong --quick --models gated_deltanet,window --out studies/babilong
    """
    speak()
    try:
        study = (long_texts.quick_study if quick else long_texts.Study)(models=names(models))
        given: dict[str, Any] = {
            "recipe": recipe,
            "seeds": seeds,
            "repeated": None if repeated is None else names(repeated),
            "tasks": None if tasks is None else names(tasks),
            "lengths": None if lengths is None else parse_counts("lengths", lengths),
            "samples": samples,
            "facts": facts,
            "background": background,
            "precision": precision,
            "batch": batch,
            "changes": (*study.changes, *(changes or ())),
        }
        study = dataclasses.replace(study, **{name: value for name, value in given.items() if value is not None})
        check_output_folder(out)
        long_texts.run_study(study, out, progress=not quiet)
    except (ValueError, ImportError, OSError) as error:
        raise refused(error) from error
    typer.echo((out / long_texts.TABLE).read_text(encoding="utf-8"))
    console.print(f"The study is in {out}", markup=False)


@studies.command("mqar")
def study_mqar(
    out: Out,
    models: Models = ALL_MODELS,
    key_widths: Annotated[str, typer.Option(help="Of the memory's heads, with commas between.")] = "8,16,32",
    steps: Steps = None,
    seeds: Seeds = 1,
    scale: Scale = "small",
    quiet: Quiet = False,
) -> None:
    """Multi-query associative recall: accuracy against the bytes of the state; a table, JSON and a figure.

    Example: atlas-memory study mqar --models transformer,gated_deltanet --key-widths 8 --steps 20 --out studies/mqar
    """
    _study_tokens(
        lambda: token_tasks.Study(
            (token_tasks.MQAR,),
            names(models),
            parse_counts("key_widths", key_widths),
            seeds,
            scale,
            _budget(token_tasks.MQAR, scale, steps),
        ),
        out,
        quiet,
    )


@studies.command("mad")
def study_mad(
    out: Out,
    models: Models = ALL_MODELS,
    tasks: Annotated[
        str, typer.Option(help=f"With commas between; all unless given: {', '.join(mad.TASKS)}.", show_default=False)
    ] = ",".join(mad.TASKS),
    steps: Steps = None,
    seeds: Seeds = 1,
    scale: Scale = "small",
    quiet: Quiet = False,
) -> None:
    """MAD: six small tasks, and their mean; a table, JSON and a figure.

    Example: atlas-memory study mad --models gated_deltanet --tasks memorization --steps 20 --out studies/mad
    """

    def chosen() -> tuple[str, ...]:
        for task in names(tasks):
            check_choice("tasks", task, mad.TASKS)
        return names(tasks)

    _study_tokens(
        lambda: token_tasks.Study(
            chosen(),
            names(models),
            seeds=seeds,
            scale=scale,
            budget=_budget(token_tasks.MAD, scale, steps),
        ),
        out,
        quiet,
    )


@studies.command("merge")
def merge_studies(
    files: Annotated[list[Path], typer.Argument(help="results.json of studies of BABILong, or of MQAR and MAD.")],
    out: Annotated[Path, typer.Option(help="Folder for the table, the results and the figure of all runs.")],
) -> None:
    """Put the runs of one study together that was made in several sittings or on several machines.

    Example: atlas-memory study merge here/results.json there/results.json --out studies/all
    """
    try:
        check_output_folder(out)
        merge(files, out)
    except (ValueError, ImportError, OSError) as error:
        raise refused(error) from error
    typer.echo((out / language_models.TABLE).read_text(encoding="utf-8"))


def _budget(kind: str, scale: str, steps: int | None) -> token_tasks.Budget:
    check_choice("scale", scale, tuple(token_tasks.BUDGETS))
    budget = token_tasks.BUDGETS[scale][kind]
    return budget if steps is None else dataclasses.replace(budget, steps=steps, epochs=None)


def _study_tokens(study: Callable[[], token_tasks.Study], out: Path, quiet: bool) -> None:
    """study: made here, where what is wrong with its options is told."""
    speak()
    try:
        check_output_folder(out)
        token_tasks.run_study(study(), out, progress=not quiet)
    except (ValueError, ImportError, OSError) as error:
        raise refused(error) from error
    typer.echo((out / token_tasks.TABLE).read_text(encoding="utf-8"))
    console.print(f"The study is in {out}", markup=False)
