"""Run a saved model over samples: streaming, scored, with intervals, and resumed where it was stopped.

A request is a list of cells; a cell is read in batches of rows. After each batch its score is kept, and every few
minutes within one the memory itself (`work.py`), so that an evaluation over ten million tokens can be stopped at any
time.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from atlas_memory.checks import check_choice, check_whole
from atlas_memory.data import IGNORED, load_tokenizer
from atlas_memory.data.tokenizers import Encoder
from atlas_memory.files import check_output, digest_of, write_json
from atlas_memory.models import AtlasCache
from atlas_memory.models.saved import load_any
from atlas_memory.models.shipped import SHIPPED, model_folder
from atlas_memory.tasks.babilong.facts import facts_digest
from atlas_memory.tasks.background import background_digest
from atlas_memory.tasks.lengths import tokens_of
from atlas_memory.tasks.precision import PRECISIONS
from atlas_memory.tasks.reading import Reader, TokenRow, answer_tokens, make_reader, room_of
from atlas_memory.tasks.results import DIGEST, PACE, Report, Result, by_content, peak_rss_mb, wilson
from atlas_memory.tasks.samples import Cell, Sample
from atlas_memory.tasks.work import Finished, WorkFolder

SAVE_EVERY = 120.0  # seconds between two saves of the memory
STEP = 1024  # tokens of a row read at once: enough for a thread with rows of its own, few enough for its cache
_MODEL_FILES = ("config.json", "tokenizer*.json", "*.safetensors", "*.bin")  # whatever its answers depend on
_SAMPLE_FILES = {"facts": facts_digest, "background": background_digest, "book": background_digest}  # by setting


@dataclasses.dataclass(frozen=True)
class Request:
    """What to evaluate. Checked as it is made, before any work.

    settings: everything the samples depend on; earlier work is gone on with only if it is the same, and the files of
    the model and of the samples are.
    """

    name: str
    model: Path  # a folder written by save_pretrained, with its tokenizer, or the name of a shipped model
    cells: Sequence[Cell]
    out: Path
    settings: dict[str, Any]
    batch: int = 8
    step: int = STEP  # tokens of a row read at once
    precision: str = PRECISIONS[0]
    save_every: float = SAVE_EVERY

    def __post_init__(self) -> None:
        for name in ("batch", "step"):
            check_whole(name, getattr(self, name))
        check_choice("precision", self.precision, PRECISIONS)
        if not self.cells:
            raise ValueError("there is nothing to evaluate; give at least one of --tasks, --lengths and --depths.")
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"model={str(self.model)!r} has no config.json; accepted: a folder written by save_pretrained, "
                f"of the model and of its tokenizer, or one of {', '.join(SHIPPED)}."
            )
        check_output(self.out)

    @property
    def folder(self) -> Path:
        return model_folder(self.model)

    def all_settings(self) -> dict[str, Any]:
        """What earlier work must have been done with to be gone on with; as it is read back from JSON."""
        model = [file for pattern in _MODEL_FILES for file in sorted(self.folder.glob(pattern))]
        samples = {name: digest for name, digest in _SAMPLE_FILES.items() if name in self.settings}
        settings = {
            "evaluation": self.name,
            "model": str(self.model),
            "model" + DIGEST: digest_of(model),
            "batch": self.batch,
            "step": self.step,
            "precision": self.precision,
            **self.settings,
            **{name + DIGEST: digest(self.settings[name]) for name, digest in samples.items()},
        }
        as_read: dict[str, Any] = json.loads(json.dumps(settings))
        return as_read


def load_report(file: Path) -> Report:
    """What `evaluate` wrote."""
    try:
        return Report.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"files: {file} has no results of an evaluation ({error!r}).") from error


def finished_report(request: Request) -> Report | None:
    """The one at `request.out`, if it is of the same request, of the same files, at whatever pace and place."""
    try:
        report = load_report(request.out)
    except (ValueError, OSError):  # none, or a file of something else
        return None
    settings = {"evaluation": report.name, "model": report.model, **report.settings}
    return report if _answering(settings) == _answering(request.all_settings()) else None


def _answering(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that answers depend on."""
    return {name: value for name, value in by_content(settings).items() if name not in PACE}


def evaluate(request: Request, progress: bool = True) -> Report:
    """Score every cell, write the report to `request.out`, and return it."""
    settings = request.all_settings()
    work = WorkFolder(request.out, settings)
    batches = [(number, batch) for number, cell in enumerate(request.cells) for batch in _batches(cell, request.batch)]
    if request.out.exists() and all(work.has(*place) for place in batches):
        work.start_anew()  # what stands there came of it
    run = _Run(request, work, _Bar(request, work, progress))
    with run.bar.shown:
        for place in batches:
            if not work.has(*place):
                work.add(run.batch(*place))
    results = [_result(cell, number, work.finished) for number, cell in enumerate(request.cells)]
    own = {name: value for name, value in settings.items() if name not in ("evaluation", "model")}
    report = Report(request.name, str(request.model), own, results)
    write_json(request.out, report.to_dict())
    work.remove()
    return report


def _batches(cell: Cell, rows: int) -> range:
    return range(-(-cell.samples // rows))


def _result(cell: Cell, number: int, finished: Sequence[Finished]) -> Result:
    mine = [entry for entry in finished if entry.cell == number]
    right = sum(sum(entry.right) for entry in mine)
    low, high = wilson(right, cell.samples)
    tokens, seconds = sum(entry.tokens for entry in mine), sum(entry.seconds for entry in mine)
    # Token ids have no characters: their own number is the length.
    characters = sum(entry.characters for entry in mine)
    gpt2_tokens = tokens if cell.sample is None else tokens_of(characters)
    return Result(
        task=cell.task,
        length=cell.length,
        samples=cell.samples,
        accuracy=right / cell.samples,
        low=low,
        high=high,
        tokens_per_second=tokens / max(seconds, 1e-9),
        peak_rss_mb=max(entry.peak_rss_mb for entry in mine),
        gpt2_tokens=gpt2_tokens / cell.samples,
        tokens=tokens / cell.samples,
        details=cell.details,
        first=cell.first,
    )


class _Run:
    """A loaded model and where its work goes. All cells are checked before the first is read."""

    def __init__(self, request: Request, work: WorkFolder, bar: _Bar) -> None:
        self.request, self.work, self.bar = request, work, bar
        self.model = load_any(request.folder)
        self._reader: Reader | None = None
        for cell in request.cells:
            if cell.check is not None:
                cell.check(self.model)
        _check_token_ids(self.model, [cell for cell in request.cells if cell.sample is None])
        if any(cell.sample is not None for cell in request.cells):
            tokenizer = load_tokenizer(request.folder)
            self._encoder = Encoder(tokenizer)
            _check_tokenizer(self.model, self._encoder)
            self._reader = make_reader(self.model, tokenizer, request.step)
            self._check_texts(self._reader)

    def _check_texts(self, reader: Reader) -> None:
        """By one text of each cell: the others are about as long."""
        for cell in self.request.cells:
            if cell.sample is not None:
                sample = cell.sample(cell.first)
                reader.check(TokenRow(sample, self._encoder), answer_tokens([sample], self._encoder))

    def batch(self, number: int, batch: int) -> Finished:
        cell = self.request.cells[number]
        begin = batch * self.request.batch
        chosen = range(begin, min(begin + self.request.batch, cell.samples))
        entry = Finished(number, batch)
        half = self.request.precision == "bfloat16"
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=half):
            if cell.sample is not None:
                entry = self._texts([cell.sample(cell.first + place) for place in chosen], entry)
            else:
                self._token_ids(cell, chosen, entry)
        entry.peak_rss_mb = max(entry.peak_rss_mb, peak_rss_mb())
        return entry

    def _texts(self, samples: Sequence[Sample], entry: Finished) -> Finished:
        assert self._reader is not None
        cache: AtlasCache | None = None
        places: list[dict[str, Any]] = [{} for _ in samples]
        if (saved := self.work.load_reading(entry.cell, entry.batch)) is not None:
            entry, places, cache = saved
            cache = cache.to(self.model.device)
            self.bar.advance(entry, tokens_of(entry.characters))
        rows = [TokenRow(sample, self._encoder, **place) for sample, place in zip(samples, places, strict=True)]
        clock = _Clock(entry, rows, self.bar)

        def watch(rows: Sequence[TokenRow], cache: AtlasCache) -> None:
            if clock.update() > self.request.save_every:
                self.work.save_reading(entry, [row.place() for row in rows], cache)
                clock.saved()

        said = self._reader.answers(rows, answer_tokens(samples, self._encoder), cache, watch)
        clock.update()
        entry.tokens += len(rows)  # the last one of each, which asks
        entry.right = [float(sample.score(text, sample.answer)) for text, sample in zip(said, samples, strict=True)]
        return entry

    @torch.inference_mode()
    def _token_ids(self, cell: Cell, chosen: range, entry: Finished) -> None:
        assert cell.examples is not None
        inputs, targets = (x[chosen.start : chosen.stop] for x in cell.examples())
        begin = time.perf_counter()
        said = (cell.said or _next_tokens)(self.model, inputs.to(self.model.device)).cpu()
        entry.seconds = time.perf_counter() - begin
        asked = targets != IGNORED
        entry.right = ((said == targets) & asked).sum(1).div(asked.sum(1)).tolist()
        entry.tokens = inputs.numel()
        self.bar.advance(entry, inputs.numel())


class _Clock:
    """Counts what rows have read, and the time it took, into an entry."""

    def __init__(self, entry: Finished, rows: Sequence[TokenRow], bar: _Bar) -> None:
        self._entry, self._rows, self._bar = entry, rows, bar
        self._before = entry.tokens, entry.characters, entry.seconds
        self._begin = self._last_save = time.perf_counter()

    def update(self) -> float:
        """Seconds since the last save."""
        tokens, characters, seconds = self._before
        entry, now, shown = self._entry, time.perf_counter(), self._entry.characters
        entry.tokens = tokens + sum(row.tokens for row in self._rows)
        entry.characters = characters + sum(row.characters for row in self._rows)
        entry.seconds = seconds + now - self._begin
        self._bar.advance(entry, tokens_of(entry.characters - shown))
        return now - self._last_save

    def saved(self) -> None:
        self._last_save = time.perf_counter()


class _Bar:
    """Progress over all cells, and its speed, in the tokens lengths are counted in."""

    def __init__(self, request: Request, work: WorkFolder, progress: bool) -> None:
        self.shown = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens, {task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            disable=not progress,
        )
        self._cells = request.cells
        total = sum(cell.length * cell.samples for cell in request.cells)
        done = sum(tokens_of(entry.characters) or entry.tokens for entry in work.finished)
        self._task = self.shown.add_task("reading", total=max(total, done, 1), completed=int(done), speed=0)

    def advance(self, entry: Finished, tokens: float) -> None:
        speed = (tokens_of(entry.characters) or entry.tokens) / max(entry.seconds, 1e-9)
        cell = self._cells[entry.cell]
        self.shown.update(self._task, advance=tokens, speed=speed, description=f"{cell.task} at {cell.length:,}")
        # Texts may turn out longer than what was asked for: with 0K they always do.
        task = self.shown.tasks[self._task]
        self.shown.update(self._task, total=max(task.completed, task.total or 0))


def _next_tokens(model: Any, inputs: Tensor) -> Tensor:
    """(N, T) the most likely token after each place."""
    likely: Tensor = model(input_ids=inputs, use_cache=False).logits.argmax(-1)
    return likely


def _check_tokenizer(model: Any, encoder: Encoder) -> None:
    if encoder.vocabulary > model.config.vocab_size:
        raise ValueError(
            f"model has vocab_size={model.config.vocab_size}, but its tokenizer needs {encoder.vocabulary}; "
            "was it trained with this tokenizer?"
        )


def _check_token_ids(model: Any, cells: Sequence[Cell]) -> None:
    """Of all cells, that the model knows their tokens, and takes as many."""
    known, room = model.config.vocab_size, room_of(model)
    needed = {cell.task: cell.vocabulary for cell in cells if (cell.vocabulary or 0) > known}
    if needed:
        fitting = dict.fromkeys(cell.task for cell in cells if cell.task not in needed)
        fit = f"give what it was trained for, of --tasks {','.join(fitting)}." if fitting else ""
        wanted = ", ".join(f"{task} needs {vocabulary}" for task, vocabulary in needed.items())
        raise ValueError(f"model has vocab_size={known}, but {wanted}; {fit or 'was it trained for this scale?'}")
    for cell in cells:
        if cell.length > room:
            raise ValueError(f"model: {type(model).__name__} takes {room} tokens, but {cell.task} has {cell.length}.")
