"""Small models of the family on tasks made of token ids, MQAR and MAD: each trained for one of them, then evaluated.

A trial is one model on one task, minutes long and in a folder of its own; a study that is stopped goes on with the
first trial that is not finished.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from atlas_memory.checks import check_choice, check_some, check_whole
from atlas_memory.data.batch import IGNORED
from atlas_memory.data.folders import replace_folder
from atlas_memory.files import write_json, write_whole
from atlas_memory.layers import Memory
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.spec import presets
from atlas_memory.studies.language_models import FIGURE, MODELS, RESULTS, TABLE
from atlas_memory.studies.token_results import MQAR, Measured, figure, markdown
from atlas_memory.tasks import mad, mqar
from atlas_memory.tasks.evaluation import Request, evaluate
from atlas_memory.tasks.results import Report
from atlas_memory.tasks.samples import Cell, Examples
from atlas_memory.train import DivergedError
from atlas_memory.train.optimizers import make_optimizers
from atlas_memory.train.plot import figure_class
from atlas_memory.train.recipe import OptimizerConfig, ScheduleConfig
from atlas_memory.train.schedule import factor, set_learning_rate

FINAL, REPORT, MEASURED = "final", "report.json", "measured.json"
TRIALS = "trials"  # in the results, and where they are kept
MAD = "mad"
PATIENCE = 10  # steps in a row with a loss or gradient that is not finite, before a trial has diverged
NOT_FINITE = "holds NaN or infinite numbers"  # what memories say of such inputs
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What every trial may spend, and the shape all models share."""

    steps: int = 800
    epochs: int | None = None  # passes over a task's training examples, in the place of steps
    batch: int = 32
    lr: float = 3e-3
    hidden_size: int = 64
    layers: int = 2
    heads: int = 2
    # Tokens between Muon's update points. What is told after the last of them is not yet known: with one in 64, the
    # default, most questions in texts of a hundred tokens would come too early.
    interval: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "lr":
                check_whole(field.name, getattr(self, field.name), optional=field.name == "epochs")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr!r} must be above 0.")

    def steps_on(self, examples: int) -> int:
        return self.steps if self.epochs is None else math.ceil(self.epochs * examples / self.batch)


# What a scale of the tasks is learned with. Of the public ones passes, batch and width are those of Arora et al. and
# Poli et al., the learning rate is one of those they try for every model; warm-up, decay and optimizer are ours.
BUDGETS = {
    "small": {MQAR: Budget(steps=1600), MAD: Budget()},
    "public": {
        MQAR: Budget(epochs=32, batch=256, lr=3e-3, hidden_size=128),
        MAD: Budget(epochs=200, batch=128, lr=5e-4, hidden_size=128),
    },
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """key_width: of each of the memory's heads; with it grows what a model can hold."""

    model: str
    task: str
    key_width: int
    seed: int

    def __post_init__(self) -> None:
        check_choice("model", self.model, tuple(MODELS))
        check_choice("task", self.task, (MQAR, *mad.TASKS))

    @property
    def name(self) -> str:
        return f"{self.model}-{self.task}-{self.key_width}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Study:
    """Which trials, at one scale of the tasks: all combinations."""

    tasks: tuple[str, ...]
    models: tuple[str, ...] = tuple(MODELS)
    key_widths: tuple[int, ...] = (16,)
    seeds: int = 1
    scale: str = "small"
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, tuple(mqar.SCALES))
        for name in ("models", "tasks", "key_widths"):
            check_some(name, getattr(self, name))
        for width in self.key_widths:
            check_whole("key_width", width)
        check_whole("seeds", self.seeds)

    def trials(self) -> list[Trial]:
        combinations = itertools.product(range(self.seeds), self.tasks, self.key_widths, self.models)
        return [Trial(model, task, width, seed) for seed, task, width, model in combinations]


def run_study(study: Study, out: Path, progress: bool = True) -> list[Measured]:
    """Every trial that is not finished; results.json and table.md in `out` after each."""
    figure_class()  # if it is not installed, to be told so after hours would be late
    trials, found = study.trials(), []
    for trial in trials:
        if (_folder(out, trial) / MEASURED).is_file():
            _finished(_folder(out, trial), study)  # with other settings it is refused, before the first trial trains
    for number, trial in enumerate(trials, start=1):
        folder = _folder(out, trial)
        if not (folder / MEASURED).is_file():
            run_trial(trial, study, folder, f"{number} of {len(trials)}: {trial.name}", progress)
        found.append(_finished(folder, study))
        write_results(study, found, out)
    figure(found, out / FIGURE)
    return found


def write_results(study: Study, found: Sequence[Measured], out: Path) -> None:
    write_json(out / RESULTS, {"study": dataclasses.asdict(study), TRIALS: [dataclasses.asdict(run) for run in found]})
    write_whole(out / TABLE, markdown(found))


def _folder(out: Path, trial: Trial) -> Path:
    return out / TRIALS / trial.name


def _finished(folder: Path, study: Study) -> Measured:
    settings = _settings(study)
    try:
        content = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
        before, measured = content["settings"], Measured(**content["measured"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"out: {folder / MEASURED} is damaged ({error!r}); remove it to repeat the trial.") from error
    if before != settings:
        raise ValueError(f"out: {folder} was made with {before}, not {settings}; choose another folder.")
    return measured


def _settings(study: Study) -> dict[str, object]:
    return {"scale": study.scale, **dataclasses.asdict(study.budget)}


def run_trial(trial: Trial, study: Study, folder: Path, words: str, progress: bool) -> None:
    """Trained, saved, evaluated, written down; that it diverged is a result too."""
    shutil.rmtree(folder, ignore_errors=True)  # one that was stopped: half an evaluation is not of the model to come
    folder.mkdir(parents=True)
    pupil, diverged, accuracy = Pupil(trial, study), False, 0.0
    # Shapes alone decide it, and weights that have diverged could not be read with.
    state_bytes = _state_bytes(pupil.model, max(cell.length for cell in _cells(trial, study.scale)))
    try:
        learn(pupil, _training(trial, study.scale), study.budget, trial.seed, words, progress)
        pupil.save(folder / FINAL)
        accuracy = _mean(_evaluated(trial, study, folder))
    except DivergedError as error:
        _log.warning("%s: %s", trial.name, error)
        diverged = True
    measured = Measured(
        **dataclasses.asdict(trial),
        accuracy=accuracy,
        state_bytes=state_bytes,
        parameters=pupil.model.num_parameters(),
        diverged=diverged,
    )
    content = {"settings": _settings(study), "measured": dataclasses.asdict(measured)}
    write_whole(folder / MEASURED, json.dumps(content, indent=1) + "\n")


def _evaluated(trial: Trial, study: Study, folder: Path) -> Report:
    settings = {**_settings(study), "seed": trial.seed}
    cells, batch = _cells(trial, study.scale), study.budget.batch
    try:
        return evaluate(Request(trial.task, folder / FINAL, cells, folder / REPORT, settings, batch), progress=False)
    except ValueError as error:
        if NOT_FINITE not in str(error):
            raise
        raise DivergedError(f"the trained model cannot be read with: {error}") from error


def _mean(report: Report) -> float:
    return statistics.mean(result.accuracy for result in report.results)


def _state_bytes(model: AtlasForCausalLM, length: int) -> int:
    return model.read(torch.zeros(1, length, dtype=torch.long), progress=False).nbytes


def _training(trial: Trial, scale: str) -> list[Examples]:
    return mqar.training(scale, trial.seed) if trial.task == MQAR else [mad.training(trial.task, scale, trial.seed)]


def _cells(trial: Trial, scale: str) -> list[Cell]:
    if trial.task == MQAR:
        return mqar.cells(seed=trial.seed, scale=scale)
    return mad.cells(seed=trial.seed, tasks=(trial.task,), scale=scale)


def _vocabulary(trial: Trial, scale: str) -> int:
    return mqar.SCALES[scale].vocabulary if trial.task == MQAR else mad.SCALES[scale][trial.task].vocabulary


def _memory(preset: str, key_width: int, interval: int) -> dict[str, int]:
    """What these tasks change of a preset."""
    muon = presets.make(preset).optimizer == "muon"
    return {"key_width": key_width, **({"interval": interval} if muon else {})}


class Pupil(nn.Module):
    """A model and, for compression, the decoder that is trained with it; (inputs, targets) → loss."""

    def __init__(self, trial: Trial, study: Study) -> None:
        super().__init__()
        torch.manual_seed(trial.seed)
        budget, row = study.budget, MODELS[trial.model]
        config = AtlasConfig(
            preset=row["preset"],
            backbone=row["backbone"],
            vocab_size=_vocabulary(trial, study.scale),
            hidden_size=budget.hidden_size,
            num_hidden_layers=budget.layers,
            num_attention_heads=budget.heads,
            memory_heads=budget.heads,
            memory=_memory(row["preset"], trial.key_width, budget.interval),
            sliding_window=16,  # of the few models that attend too: shorter than what is asked for
        )
        self.model = AtlasForCausalLM(config)
        for module in self.model.modules():
            if isinstance(module, Memory):
                module.check_finite = False  # `learn` looks itself, and goes on
        setting = mad.SCALES[study.scale]["compression"]
        self.decoder = mad.Decoder(budget.hidden_size, setting) if trial.task == "compression" else None

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.decoder is None:
            logits = self.model(input_ids=inputs, use_cache=False).logits
        else:
            logits = self.decoder(mad.hidden_of_mark(self.model, inputs))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)

    def optimizers(self, lr: float) -> list[torch.optim.Optimizer]:
        made = make_optimizers(self.model, OptimizerConfig(lr=lr))
        return made if self.decoder is None else [*made, torch.optim.AdamW(self.decoder.parameters(), lr=lr)]

    def save(self, folder: Path) -> None:
        with replace_folder(folder) as into:
            self.model.save_pretrained(into)
            if self.decoder is not None:
                self.decoder.save(into)


def learn(
    pupil: Pupil, groups: Sequence[Examples], budget: Budget, seed: int, words: str, progress: bool = True
) -> list[float]:
    """So many steps on examples in random order; the losses. Steps that are not finite change nothing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pupil.to(device).train()
    steps = budget.steps_on(sum(len(group.inputs) for group in groups))
    optimizers, schedule = pupil.optimizers(budget.lr), ScheduleConfig(name="cosine", warmup=steps // 20)
    losses: list[float] = []
    skipped = 0  # in a row
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(elapsed_when_finished=True), console=Console(stderr=True), disable=not progress,
    )  # fmt: skip
    with bar:
        task = bar.add_task(words, total=steps, loss=float("nan"))
        for step, (inputs, targets) in enumerate(itertools.islice(_batches(groups, budget.batch, seed), steps)):
            loss: Tensor = pupil(inputs.to(device), targets.to(device))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(pupil.parameters(), 1.0)
            set_learning_rate(optimizers, budget.lr * factor(schedule, step, steps))
            losses.append(loss.item())
            finite = math.isfinite(losses[-1]) and math.isfinite(norm.item())
            for optimizer in optimizers:
                if finite:
                    optimizer.step()
                optimizer.zero_grad()
            skipped = 0 if finite else skipped + 1
            if skipped == PATIENCE:
                break
            bar.update(task, advance=1, loss=losses[-1])
    # A model that ends with steps it could not take is not to be trusted either.
    if skipped or not all(bool(parameter.isfinite().all()) for parameter in pupil.parameters()):
        raise DivergedError(f"losses, gradients or weights are not finite, up to the end of step {len(losses)}.")
    pupil.eval()
    return losses


def _batches(groups: Sequence[Examples], batch: int, seed: int) -> Iterator[Examples]:
    """Without end: each batch from one group, drawn by its size; the examples of a group in ever new orders."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([len(group.inputs) for group in groups], dtype=torch.float)
    streams = [_shuffled(group, batch, random) for group in groups]
    while True:
        yield next(streams[int(torch.multinomial(sizes, 1, generator=random))])


def _shuffled(group: Examples, batch: int, random: torch.Generator) -> Iterator[Examples]:
    while True:
        for chosen in torch.randperm(len(group.inputs), generator=random).split(batch):
            yield Examples(group.inputs[chosen], group.targets[chosen])
