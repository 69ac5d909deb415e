"""The training loop: data, learner, evaluation, checkpoints and records, in the order of their steps."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from atlas_memory.data import (
    DataConfig,
    Loader,
    load_tokenizer,
    make_exercise,
    make_loader,
    read_documents,
)
from atlas_memory.data.folders import replace_folder
from atlas_memory.data.sources import TextFiles
from atlas_memory.data.tokenizers import Encoder, end_token, vocabulary_size
from atlas_memory.models import AtlasForCausalLM
from atlas_memory.models.joining import join
from atlas_memory.train.checkpoint import Checkpoints, Progress, seed_random_numbers
from atlas_memory.train.kept_tokenizer import keep_tokenizer
from atlas_memory.train.learner import Learner, Outcome
from atlas_memory.train.recipe import Recipe, make_config
from atlas_memory.train.recipe_files import differences, save_recipe
from atlas_memory.train.records import LOG, Records, forget_after, trackers
from atlas_memory.train.schedule import factor, penalties
from atlas_memory.train.sharding import gathered

RECIPE = "recipe.yaml"
CHECKPOINTS = "checkpoints"
FINAL = "final"
TOKENIZER = "tokenizer"
_PRECISIONS = {"float32": "no", "bfloat16": "bf16"}
_log = logging.getLogger(__name__)


class DivergedError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


def train(recipe: Recipe, out: Path, *, resume: bool = False, progress: bool = True) -> Path:
    """Train as the recipe says; the folder of the trained model and its tokenizer, `out/final`.

    resume: go on from the newest whole checkpoint, if there is one. Every process of a launch calls this.
    """
    accelerator = make_accelerator(recipe, out)
    _check_folder(out, recipe, resume)
    accelerator.wait_for_everyone()  # all have looked before one writes
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        _report_differences(out, recipe)
    final = Training(recipe, out, accelerator, progress).run(resume)
    accelerator.end_training()
    return final


def make_accelerator(recipe: Recipe, out: Path) -> Accelerator:
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=_PRECISIONS[recipe.loop.precision],
        log_with=trackers(recipe) or None,
        project_config=ProjectConfiguration(str(out), str(out / "tensorboard")),
    )


def _check_folder(out: Path, recipe: Recipe, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; it must be a folder.")
    source = recipe.data.source.path
    if not resume:
        _check_source(recipe)
    if source and out.resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(f"out={str(out)!r} lies in the source folder, and would be read as text; choose another.")
    if not resume and any((out / name).exists() for name in (CHECKPOINTS, FINAL, LOG, TOKENIZER)):
        raise ValueError(f"out={str(out)!r} holds a run already; go on with --resume, or choose another folder.")


def _check_source(recipe: Recipe) -> None:
    """Before a folder is made for the run."""
    source = recipe.data.source
    try:
        if source.kind == "text":
            TextFiles(source)
    except ValueError as error:
        raise ValueError(f"data.source.path={source.path!r}: {error}") from error


def _report_differences(out: Path, recipe: Recipe) -> None:
    if not (out / RECIPE).is_file():
        return
    before = yaml.safe_load((out / RECIPE).read_text(encoding="utf-8"))
    if not isinstance(before, dict):
        raise ValueError(f"out={str(out)!r}: its {RECIPE} is damaged; remove that file, or choose another folder.")
    for field, old, new in differences(before, recipe.to_dict()):
        _log.warning("The recipe has changed since the run began: %s was %r, and is %r.", field, old, new)


class Training:
    """One call of `train`: all parts of a run, made from its recipe."""

    def __init__(self, recipe: Recipe, out: Path, accelerator: Accelerator, progress: bool) -> None:
        self.recipe, self.out, self.accelerator = recipe, out, accelerator
        self.show = progress and accelerator.is_main_process
        seed_random_numbers(recipe.seed, 0)  # the same initial weights on every rank
        self.data, self.tokenizer = self._tokenizer()
        self.learner = Learner(accelerator, self._model(), recipe)
        self.train_data = self._loader(self.data, "train")
        self.validation_data = self._validation_loader()
        self.checkpoints = Checkpoints(out / CHECKPOINTS, accelerator, recipe.checkpoint.keep)
        self.progress = Progress()
        self.looked_at = self.saved_at = -1  # steps
        self.last_monitors: dict[str, float] = {}
        seed_random_numbers(recipe.seed, accelerator.process_index)

    def _model(self) -> AtlasForCausalLM:
        """The recipe's with new weights, or the one to go on from."""
        if self.recipe.start:
            return join([AtlasForCausalLM.from_pretrained(folder) for folder in self.recipe.start])
        return AtlasForCausalLM(
            make_config(
                self.recipe.model,
                vocab_size=vocabulary_size(self.tokenizer),
                eos_token_id=end_token(self.tokenizer),
                pad_token_id=self.tokenizer.pad_token_id,
            )
        )

    def _tokenizer(self) -> tuple[DataConfig, PreTrainedTokenizerBase]:
        """The recipe's, or one trained now on the training documents and kept beside the run."""
        data, wanted = self.recipe.data, self.recipe.tokenizer
        if self.recipe.start:
            data = dataclasses.replace(data, tokenizer=self._common_tokenizer())
        if wanted.vocabulary is not None:
            folder = self.out / TOKENIZER
            if self.accelerator.is_main_process:
                self._make_tokenizer(folder, wanted.vocabulary)
            self.accelerator.wait_for_everyone()
            data = dataclasses.replace(data, tokenizer=str(folder))
        return data, load_tokenizer(data.tokenizer)

    def _common_tokenizer(self) -> str:
        """The folder with the tokenizer of all models to go on from."""
        first, *others = self.recipe.start
        fingerprint = Encoder(load_tokenizer(first)).fingerprint
        for other in others:
            if Encoder(load_tokenizer(other)).fingerprint != fingerprint:
                raise ValueError(f"start: {first} and {other} have different tokenizers; joined models need one.")
        return first

    def _make_tokenizer(self, folder: Path, vocabulary: int) -> None:
        fields = self.recipe.to_dict()
        data = {name: fields["data"][name] for name in ("source", "validation", "exercises")}
        made_from = {"tokenizer": fields["tokenizer"], **data}
        keep_tokenizer(folder, self._texts(), vocabulary, made_from, progress=self.show)

    def _texts(self) -> Iterator[str]:
        """What a tokenizer is trained on: documents of the source, and lessons of every exercise."""
        data = self.recipe.data
        documents = read_documents(data.source, "train", data.validation)
        yield from (document.text for document in itertools.islice(documents, self.recipe.tokenizer.documents))
        for config in data.exercises:
            exercise = make_exercise(config, "train")
            yield from (exercise.text(number) for number in range(self.recipe.tokenizer.lessons))

    def _loader(self, data: DataConfig, split: str) -> Loader:
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return make_loader(data, split, rank, world, progress=self.show)

    def _validation_loader(self) -> Loader | None:
        if not self.recipe.evaluation.every:
            return None
        rows = self.data.rows
        longest = max([rows.length, *(length for _, length in rows.lengths)])
        epochs = None if self.data.exercises else 1  # exercises have no end
        rows = dataclasses.replace(rows, length=longest, lengths=(), shuffle=False, epochs=epochs)
        return self._loader(dataclasses.replace(self.data, rows=rows, loading_workers=0), "validation")

    def run(self, resume: bool) -> Path:
        if resume:
            self._resume()
        if self.accelerator.is_main_process:  # not before it is known that this recipe goes on with that run
            save_recipe(self.recipe, self.out / RECIPE)
        with Records(self.out, self.recipe, self.accelerator, self.progress.step, self.show) as records:
            while self.progress.step < self.recipe.loop.steps:
                if not self.step(records):
                    _log.warning("The data ended after %d steps.", self.progress.step)
                    self._look_and_save(records, last=True)
                    records.write({"step": self.progress.step, "data_ended": True})
                    break
        return self._finish()

    def _resume(self) -> None:
        newest = self.checkpoints.newest()
        if newest is not None:
            self.progress = self.checkpoints.load(newest, self.learner, self.recipe.seed)
            self.train_data.load_state_dict(self.progress.data)
            self.saved_at = self.progress.step
            self.looked_at = max(map(int, self.progress.validation), default=-1)
            _log.info("Going on from %s.", newest)
        if self.accelerator.is_main_process:
            forget_after(self.out, self.progress.step, self.looked_at == self.progress.step)
        self.accelerator.wait_for_everyone()

    def step(self, records: Records) -> bool:
        """One step and what is due after it; False where there are no more data."""
        begin = time.perf_counter()
        batch = next(self.train_data, None)
        if batch is None:
            return False
        waited = time.perf_counter() - begin
        recipe, number = self.recipe, self.progress.step + 1
        last = number == recipe.loop.steps
        logged = number % recipe.logging.every == 0 or number == 1 or last
        rate = recipe.optimizer.lr * factor(recipe.schedule, self.progress.step, recipe.loop.steps)
        held = penalties(recipe.loop, self.progress.step)
        outcome = self.learner.step(batch, rate, logged and recipe.logging.monitors, held)
        self._count(outcome, batch.token_count)
        if logged:
            seconds = time.perf_counter() - begin
            records.write(self._line(outcome, rate, batch.token_count / seconds, waited / seconds))
        records.advance()
        self._check_patience(outcome)
        self._look_and_save(records, last)
        return True

    def _look_and_save(self, records: Records, last: bool) -> None:
        """Validation and checkpoint, where they are due; both after the last step, once."""
        number, every = self.progress.step, self.recipe.checkpoint.every
        due = self.validation_data is not None and (last or number % self.recipe.evaluation.every == 0)
        if due and self.looked_at != number:
            records.write({"step": number, "validation_loss": self._validate()})
        if (last or (every and number % every == 0)) and self.saved_at != number:
            self.progress.data = self.train_data.state_dict()
            self.checkpoints.save(self.learner, self.progress)
            self.saved_at = number

    def _count(self, outcome: Outcome, tokens: int) -> None:
        self.progress.step += 1
        self.progress.tokens += tokens
        self.progress.skipped += not outcome.applied
        self.progress.skipped_in_a_row = 0 if outcome.applied else self.progress.skipped_in_a_row + 1
        self.last_monitors |= outcome.monitors

    def _line(self, outcome: Outcome, rate: float, tokens_per_second: float, waited: float) -> dict[str, Any]:
        return {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "loss": outcome.loss,
            "lr": rate,
            "gradient_norm": outcome.gradient_norm,
            "skipped": self.progress.skipped,
            "tokens_per_second": tokens_per_second,
            "waited_for_data": waited,  # share of the step
            "time": time.time(),
            **outcome.monitors,
        }

    def _check_patience(self, outcome: Outcome) -> None:
        if outcome.applied:
            return
        in_a_row, patience = self.progress.skipped_in_a_row, self.recipe.loop.patience
        _log.warning(
            "Step %d is skipped: loss %s, gradient norm %s (%d in a row).",
            self.progress.step, outcome.loss, outcome.gradient_norm, in_a_row,
        )  # fmt: skip
        if in_a_row >= patience:
            seen = ", ".join(f"{name} {value:.4g}" for name, value in self.last_monitors.items()) or "none were taken"
            raise DivergedError(
                f"{in_a_row} steps in a row had a loss or gradient that is not finite (loop.patience={patience}); "
                f"stopped at step {self.progress.step}. The last monitors: {seen}. "
                "A smaller optimizer.lr or a longer schedule.warmup may help; --resume goes on from a checkpoint."
            )

    def _validate(self) -> float:
        assert self.validation_data is not None
        self.validation_data.restart()
        loss = self.learner.loss(itertools.islice(self.validation_data, self.recipe.evaluation.batches))
        self.looked_at = self.progress.step
        if math.isfinite(loss):
            self.progress.validation[str(self.progress.step)] = loss
        return loss

    def _finish(self) -> Path:
        final, weights = self.out / FINAL, gathered(self.learner.model.state_dict())
        if self.accelerator.is_main_process:
            if self.recipe.checkpoint.final == "float16":
                weights = _halved(weights)
            with replace_folder(final) as folder:
                self.learner.model.save_pretrained(folder, state_dict=weights)
                self.tokenizer.save_pretrained(folder)
        self.accelerator.wait_for_everyone()
        return final


def _halved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In half precision; what is one tensor, such as tied embeddings, stays one."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    return {name: made.setdefault((w.data_ptr(), w.shape), w.half()) for name, w in weights.items()}
