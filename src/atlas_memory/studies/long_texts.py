"""Models of the family on BABILong: trained by one recipe, then read with, far beyond the lengths of the training."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas_memory.checks import check_choice, check_some, check_whole
from atlas_memory.data.options import TEXT_SUFFIXES
from atlas_memory.data.sources import TextFiles
from atlas_memory.files import write_json, write_whole
from atlas_memory.models.accounting import count_parameters, fitted_config
from atlas_memory.models.configuration_atlas import AtlasConfig
from atlas_memory.studies.accuracies import Runs, markdown
from atlas_memory.studies.language_models import FIGURE, RESULTS, TABLE, WIDTH_STEP
from atlas_memory.studies.runs import check_same, finished, run_folder, run_name, trained
from atlas_memory.tasks import figures
from atlas_memory.tasks.babilong import stream
from atlas_memory.tasks.babilong.facts import SIMULATOR, TASKS
from atlas_memory.tasks.background import BUILTIN
from atlas_memory.tasks.evaluation import Request, evaluate, finished_report
from atlas_memory.tasks.files import find_files
from atlas_memory.tasks.precision import PRECISIONS
from atlas_memory.tasks.results import Report
from atlas_memory.tasks.samples import Cell
from atlas_memory.train import Recipe, load_recipe
from atlas_memory.train.loop import FINAL
from atlas_memory.train.plot import figure_class

BASE, EXERCISE, REPORT = "babilong", "babilong", "babilong.json"
REPORTS = "reports"  # in the results
_log = logging.getLogger(__name__)


def _after_attention(preset: str, **memory: Any) -> dict[str, Any]:
    """Two layers of a memory behind one of attention, as in the shipped model."""
    layers = ["sliding_attention", preset, preset]
    return {"preset": preset, "layer_types": layers, "num_hidden_layers": len(layers), "memory": memory}


HARD: dict[str, Any] = {"gates": "hard", "tie_retention": True}
# A memory that begins by repeating its query drowns its first writes, and gradients that are taken once in 64 tokens do
# not overwrite what the sentence before has said (docs/findings.md, "Deep memories").
DEEP: dict[str, Any] = {**HARD, "key_width": 32, "residual": False, "chunk": 16}


# Name in the table → what distinguishes the model from the recipe's. Feed-forward layers make up for the parameters.
MODELS: dict[str, dict[str, Any]] = {
    "gated_deltanet": _after_attention("gated_deltanet", key_width=32, **HARD),
    "titans": _after_attention("titans", **DEEP),
    "omeganet": _after_attention("omeganet", **DEEP),
    # With an update in 64 tokens attention knows what the memory learns next, whose gates close before it is heard.
    # With keys of 32, whose features are 561 wide, Newton–Schulz at each chunk makes a step five times as long.
    "atlas": _after_attention("atlas", interval=16, **DEEP | {"key_width": 16, "value_width": 32}),
    # A sliding window in the memory's place, with its short convolution: attention alone is slow to learn to bind.
    "window": _after_attention("transformer", key_width=32, horizon=64),
    "memory_tokens": {
        "preset": None,
        "layer_types": ["memory_tokens"],
        "memory": None,
        "num_hidden_layers": 1,
        "memory_token_layers": 3,
        "segment_length": 64,
    },
}


@dataclasses.dataclass(frozen=True)
class Study:
    """recipe: a path or a shipped name; changes: `section.field=value` of it. The rest: as of `eval babilong`."""

    recipe: str = BASE
    changes: tuple[str, ...] = ()
    models: tuple[str, ...] = tuple(MODELS)
    seeds: int = 1
    repeated: tuple[str, ...] | None = None  # the models that are trained with every seed, others with the first; all
    tasks: tuple[str, ...] = TASKS[:5]
    lengths: tuple[int, ...] = (0, 4000, 128_000)
    samples: int = 25
    facts: str = SIMULATOR
    background: str = BUILTIN
    precision: str = PRECISIONS[0]
    batch: int = 8  # samples read side by side

    def __post_init__(self) -> None:
        for name in ("models", "tasks", "lengths"):
            check_some(name, getattr(self, name))
        for model in self.models:
            check_choice("model", model, tuple(MODELS))
        for model in self.repeated or ():
            check_choice("repeated", model, self.models)
        check_whole("seeds", self.seeds)
        check_whole("batch", self.batch)
        check_choice("precision", self.precision, PRECISIONS)

    def seeds_of(self, model: str) -> range:
        return range(self.seeds if self.repeated is None or model in self.repeated else 1)


def run_study(study: Study, out: Path, progress: bool = True) -> dict[str, Report]:
    """Train and read what is not done yet; table.md, results.json and figure.png in `out` after every run."""
    figure_class()  # if it is not installed, to be told so after hours would be late
    out = out.resolve()
    base = base_recipe(study)
    notes = [_seen_in_training(study)] if trained_on(base, study.background) else []
    for note in notes:
        _log.warning("%s", note)
    cells = stream.cells(study.lengths, study.samples, 0, study.tasks, study.facts, study.background)
    runs = [(model, seed) for seed in range(study.seeds) for model in study.models if seed in study.seeds_of(model)]
    recipes = {(model, seed): recipe_of(base, model, seed) for model, seed in runs}
    for (model, seed), recipe in recipes.items():
        folder = run_folder(out, model, seed)
        check_same(folder, recipe)
        if (folder / REPORT).exists() and finished_report(_request(study, cells, folder)) is None:
            raise ValueError(f"{folder / REPORT} holds another evaluation; give the same settings, or another folder.")
    reports: dict[str, Report] = {}
    diverged: list[str] = []  # which is a result too
    for (model, seed), recipe in recipes.items():
        folder = run_folder(out, model, seed)
        if finished(folder, recipe) or trained(folder, recipe, progress):
            request = _request(study, cells, folder)
            reports[folder.name] = finished_report(request) or evaluate(request, progress)
        else:
            diverged.append(folder.name)
        write_results(study, reports, diverged, notes, out)
    return reports


def _request(study: Study, cells: Sequence[Cell], folder: Path) -> Request:
    """What to ask of the model of a run."""
    names = ("tasks", "lengths", "samples", "facts", "background")
    settings = {name: getattr(study, name) for name in names}
    report, precision = folder / REPORT, study.precision
    return Request("babilong", folder / FINAL, cells, report, settings, study.batch, precision=precision)


def write_results(
    study: Study, reports: Mapping[str, Report], diverged: Sequence[str], notes: Sequence[str], out: Path
) -> None:
    content = {
        "study": dataclasses.asdict(study),
        "notes": notes,
        "diverged": diverged,
        REPORTS: {name: report.to_dict() for name, report in reports.items()},
    }
    write_json(out / RESULTS, content)
    models = {}
    for model in study.models:
        names = [run_name(model, seed) for seed in study.seeds_of(model)]
        runs = Runs([reports[name] for name in names if name in reports], sum(name in diverged for name in names))
        if runs.reports or runs.diverged:
            models[model] = runs
    write_whole(out / TABLE, markdown(models, study.tasks, study.lengths, [*notes, *_precisions(reports)]))
    if reports:
        figures.compare({name: runs.together() for name, runs in models.items() if runs.reports}, out / FIGURE)


def _precisions(reports: Mapping[str, Report]) -> list[str]:
    """Which runs were read in which precision, where they differ."""
    runs: dict[str, list[str]] = {}
    for name, report in reports.items():
        runs.setdefault(str(report.settings.get("precision")), []).append(name)
    read = "; ".join(f"in {precision}: {', '.join(names)}" for precision, names in runs.items())
    return [f"Read {read}."] if len(runs) > 1 else []


def base_recipe(study: Study) -> Recipe:
    """What all models are trained by: with a model of its own, for theirs to take its place."""
    base = load_recipe(study.recipe, list(study.changes))
    if base.start:
        raise ValueError(f"recipe={study.recipe!r} goes on from a trained model; accepted: one with `model`.")
    if "size" in base.model:
        raise ValueError(f"recipe={study.recipe!r} has model.size; accepted: one with widths and depth of its own.")
    return base


def trained_on(recipe: Recipe, background: str) -> bool:
    """Whether there is text of this background in what the recipe trains on."""
    data, learned = recipe.data, set[str | Path]()
    if data.source_share and data.source.kind == "text":
        learned |= {file.resolve() for file in TextFiles(data.source).files}
    for exercise in data.exercises:
        if exercise.name == EXERCISE:
            learned |= _texts(exercise.options.get("background", BUILTIN))
    return not learned.isdisjoint(_texts(background))


def _texts(background: str) -> set[str | Path]:
    if background == BUILTIN:
        return {BUILTIN}
    return {file.resolve() for file in find_files("background", background, TEXT_SUFFIXES)}


def _seen_in_training(study: Study) -> str:
    return (
        f"background={study.background!r}: recipe={study.recipe!r} trains on this text too; "
        "how models do among text they have not seen is not measured."
    )


def recipe_of(base: Recipe, model: str, seed: int) -> Recipe:
    """The recipe with another model, of as many parameters as its own."""
    fields = base.to_dict()
    described = {**fields["model"], **MODELS[model]}
    fields["model"] = {**described, "intermediate_size": _fitted_width(base.model, described)}
    fields["seed"] = fields["data"]["rows"]["seed"] = seed
    for exercise in fields["data"]["exercises"]:
        if seed and exercise["name"] == EXERCISE:  # other stories too, and among other text
            exercise["options"]["seed"] = exercise["options"].get("seed", 0) + seed
    if (described.get("memory") or {}).get("gates") != HARD["gates"]:  # no gates that could learn to stay shut
        fields["loop"]["write_penalty"] = fields["loop"]["leak_penalty"] = 0.0
    return Recipe.model_validate(fields)


def _fitted_width(own: Mapping[str, Any], described: Mapping[str, Any]) -> int:
    parameters = sum(count_parameters(AtlasConfig(**own)))
    free = {name: value for name, value in described.items() if name != "intermediate_size"}
    width = fitted_config(parameters, initial=True, width_step=WIDTH_STEP, **free).intermediate_size
    assert width is not None
    return width


def quick_study(models: Sequence[str]) -> Study:
    """Everything a study does, in minutes: few steps, short texts, built-in text. Its numbers mean nothing."""
    changes = (
        "loop.steps=4",
        "evaluation.every=0",
        "data.rows.batch=4",
        "data.rows.length=64",
        "tokenizer.vocabulary=null",
        "data.tokenizer=bytes",
        "model.hidden_size=48",
        "model.intermediate_size=64",
        "logging.tensorboard=false",
    )
    return Study("demo", changes, tuple(models), tasks=("qa1",), lengths=(0, 200), samples=2)
