"""Small language models of the family at equal parameters and equal tokens: trained, summed up, drawn.

Every run is an ordinary run of `train`, in a folder of its own, so that a killed study goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas_memory.data import SourceConfig, load_tokenizer, read_documents
from atlas_memory.data.tokenizers import vocabulary_size
from atlas_memory.files import finite, write_whole
from atlas_memory.models.accounting import count_parameters, fitted_config
from atlas_memory.models.configuration_atlas import AtlasConfig
from atlas_memory.studies.runs import check_same, finished, run_folder, trained
from atlas_memory.studies.summaries import Result, figure, markdown, summarise
from atlas_memory.train import Recipe, load_recipe
from atlas_memory.train.kept_tokenizer import keep_tokenizer
from atlas_memory.train.plot import figure_class
from atlas_memory.train.records import read_log

# Name in the table → what distinguishes the model. Everything else is the base recipe's.
MODELS: dict[str, dict[str, str]] = {
    **{
        preset: {"preset": preset, "backbone": "lmm"}
        for preset in (
            "transformer", "gated_deltanet", "titans", "omeganet", "atlas", "atlas++", "deep_transformer", "dot",
        )
    },
    "atlas+mag": {"preset": "atlas", "backbone": "mag"},
}  # fmt: skip
BASE = "lm-books"
WIDTH_STEP = 8  # of feed-forward layers: 64 would miss the number of parameters by percents
TOLERANCE = 0.02  # of the number of parameters, else the comparison would not be one of equals
EVALUATIONS = 10  # points of a curve
RESULTS, TABLE, FIGURE = "results.json", "table.md", "figure.png"


@dataclasses.dataclass(frozen=True)
class Study:
    """What is compared. data: as `SourceConfig.parse` takes it; changes: `section.field=value` of every recipe."""

    data: str
    tokens: int = 2_000_000
    seeds: int = 3
    models: tuple[str, ...] = tuple(MODELS)
    parameters: int = 2_900_000
    vocabulary: int = 4096
    batch: int = 8
    length: int = 256
    changes: tuple[str, ...] = ()
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # widths and depth; empty: the base recipe's

    def __post_init__(self) -> None:
        for name in ("tokens", "seeds", "parameters", "vocabulary", "batch", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        unknown = [model for model in self.models if model not in MODELS]
        if unknown or not self.models:
            raise ValueError(f"models={', '.join(unknown) or 'none'} must be among: {', '.join(MODELS)}.")

    @property
    def steps(self) -> int:
        """As many as it takes to read all the tokens."""
        return -(-self.tokens // (self.batch * self.length))


def quick_study() -> Study:
    """Everything a study does, in a minute or two: tiny models, one seed. Its numbers mean nothing."""
    return Study(
        data="builtin",
        tokens=2048,
        seeds=1,
        parameters=60_000,
        vocabulary=512,
        batch=4,
        length=64,
        changes=("data.source.limit=60", "evaluation.batches=2", "logging.every=1"),
        shape={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "sliding_window": 32,
            "memory": {"key_width": 8, "chunk": 16},
        },
    )


def run_study(study: Study, out: Path, progress: bool = True) -> list[Result]:
    """Train what is not trained yet; results.json, table.md and figure.png in `out` after every run."""
    figure_class()  # if it is not installed, to be told so after hours would be late
    out = out.resolve()  # recipes name the tokenizer's folder, and must be the same from wherever a study is continued
    base = _base_recipe(study, out)
    _make_tokenizer(study, base)
    recipes = {  # seed after seed: a study that is not finished has all models
        (model, seed): _recipe(study, base, model, seed) for seed in range(study.seeds) for model in study.models
    }
    for (model, seed), recipe in recipes.items():
        check_same(run_folder(out, model, seed), recipe)
    results: list[Result] = []
    for (model, seed), recipe in recipes.items():
        folder = run_folder(out, model, seed)
        diverged = not finished(folder, recipe) and not trained(folder, recipe, progress)
        results.append(_result(folder, recipe, model, seed, diverged))
        _write(study, results, out)
    return results


def _base_recipe(study: Study, out: Path) -> Recipe:
    """What all runs share: data, one tokenizer, optimizer, schedule."""
    source = SourceConfig.parse(study.data)
    every = max(1, study.steps // EVALUATIONS)
    settings = {
        "tokenizer.vocabulary": None,
        "data.source": {"kind": source.kind, "path": source.path},
        "data.tokenizer": str(out / "tokenizer"),
        "data.rows": {"kind": "packed", "batch": study.batch, "length": study.length},
        "schedule.warmup": max(1, study.steps // 20),
        "loop.steps": study.steps,
        "evaluation": {"every": every, "batches": 32},
        "checkpoint": {"every": 2 * every, "keep": 1},
        # Monitors would slow down just the steps whose speed is logged.
        "logging": {"every": min(10, every), "monitors": False, "tensorboard": False},
        **{f"model.{name}": value for name, value in study.shape.items()},
    }
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    return load_recipe(BASE, [*overrides, *study.changes])


def _make_tokenizer(study: Study, base: Recipe) -> None:
    """Trained on the training documents, unless it is there."""
    for model in study.models:  # before the work; it may have fewer tokens than it was asked for, which fit as well
        _fitted(study, {**base.model, **MODELS[model]}, study.vocabulary, model)
    documents = read_documents(base.data.source, "train", base.data.validation)
    data = base.to_dict()["data"]
    made_from = {"vocabulary": study.vocabulary, "source": data["source"], "validation": data["validation"]}
    texts = (document.text for document in documents)
    keep_tokenizer(Path(base.data.tokenizer), texts, study.vocabulary, made_from)


def _recipe(study: Study, base: Recipe, model: str, seed: int) -> Recipe:
    """One run: the base with this memory, and feed-forward layers as wide as the number of parameters asks for."""
    fields = base.to_dict()
    described = {**fields["model"], **MODELS[model]}
    config = _fitted(study, described, vocabulary_size(load_tokenizer(base.data.tokenizer)), model)
    fields["model"] = {**described, "intermediate_size": config.intermediate_size}
    fields["seed"] = fields["data"]["rows"]["seed"] = seed
    return Recipe.model_validate(fields)


def _fitted(study: Study, fields: dict[str, Any], vocabulary: int, model: str) -> AtlasConfig:
    config = fitted_config(
        study.parameters, initial=True, width_step=WIDTH_STEP, **{**fields, "vocab_size": vocabulary}
    )
    counted = sum(count_parameters(config))
    if abs(counted - study.parameters) > TOLERANCE * study.parameters:
        raise ValueError(
            f"parameters={study.parameters:,} cannot be met by {model}, which has {counted:,} with the feed-forward "
            "layers that come nearest; take more, a smaller vocabulary or a smaller shape."
        )
    return config


def _result(folder: Path, recipe: Recipe, model: str, seed: int, diverged: bool) -> Result:
    lines = read_log(folder)
    curve = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    per_step = recipe.data.rows.batch * recipe.data.rows.length
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    config = AtlasConfig(**recipe.model, vocab_size=vocabulary_size(tokenizer))
    return Result(
        model=model,
        seed=seed,
        parameters=sum(count_parameters(config)),
        diverged=diverged,
        tokens=[step * per_step for step, _ in curve],
        validation_losses=[loss for _, loss in curve],
        speeds=[line["tokens_per_second"] for line in lines[1:] if "tokens_per_second" in line],
    )


def _write(study: Study, results: Sequence[Result], out: Path) -> None:
    """Each file whole or not at all."""
    rows = summarise(results)
    content = {
        "study": dataclasses.asdict(study),
        "models": [dataclasses.asdict(row) for row in rows],
        "runs": [dataclasses.asdict(result) for result in results],
    }
    for name, text in ((RESULTS, json.dumps(finite(content), indent=1) + "\n"), (TABLE, markdown(rows))):
        write_whole(out / name, text)
    figure(results, out / FIGURE)
