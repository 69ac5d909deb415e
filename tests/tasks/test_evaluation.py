"""Evaluation: rows read side by side, scored, interrupted and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import GenerationMixin, PreTrainedTokenizerBase

from atlas_memory.data.tokenizers import Encoder, beginning, byte_tokenizer, load_tokenizer
from atlas_memory.models import AtlasCache, AtlasForCausalLM, AtlasModel
from atlas_memory.models.saved import load_any, load_saved
from atlas_memory.ops import MemoryState
from atlas_memory.tasks import evaluation, mqar
from atlas_memory.tasks.babilong import stream
from atlas_memory.tasks.babilong.solver import Solver
from atlas_memory.tasks.evaluation import Request, evaluate, finished_report
from atlas_memory.tasks.reading import StreamReader, TokenRow, make_reader
from atlas_memory.tasks.samples import Cell
from atlas_memory.tasks.work import Finished, WorkFolder
from tests.tasks.conftest import save_small, without_times

TOKENIZER = byte_tokenizer()


def request(model: Path, out: Path, **fields: Any) -> Request:
    chosen = {"lengths": [0, 300], "samples": 3, "tasks": ["qa1", "qa5"]}
    cells = stream.cells(**chosen)  # type: ignore[arg-type]
    return Request(**{"name": "babilong", "model": model, "cells": cells, "out": out, "settings": chosen, **fields})


class Oracle:
    """Reads the text itself, and answers what follows from it."""

    def answers(self, rows: Sequence[TokenRow], new_tokens: int, cache: AtlasCache | None, watch: Any) -> list[str]:
        said = []
        for row in rows:
            ids = []
            while taken := row.take(37):
                ids += taken
            *sentences, question = str(TOKENIZER.decode(ids + row.waiting)).replace("?", "?.").split(". ")
            solver = Solver()
            for sentence in sentences:
                try:
                    solver.tell(f"{sentence}.")
                except ValueError:
                    continue  # background
            said.append(f" {solver.answer(question.rstrip('.')).text}.")
        return said

    def check(self, row: TokenRow, new_tokens: int) -> None:
        """It takes any length."""


def test_who_reads_everything_has_everything_right(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "make_reader", lambda *_: Oracle())
    report = evaluate(request(byte_model, tmp_path / "out.json", batch=2), progress=False)
    assert [(result.task, result.length, result.accuracy) for result in report.results] == [
        (task, length, 1.0) for task in ("qa1", "qa5") for length in (0, 300)
    ]


def test_the_file(byte_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    report = evaluate(request(byte_model, out, batch=2), progress=False)
    content = json.loads(out.read_text())
    assert content == json.loads(json.dumps(report.to_dict())) and content["model"] == str(byte_model)
    fields = {"task", "length", "samples", "accuracy", "low", "high", "tokens_per_second", "peak_rss_mb"}
    for row in content["results"]:
        assert fields <= set(row) and row["low"] <= row["accuracy"] <= row["high"] and row["samples"] == 3
    # Bytes are characters here: both counts are of the same text.
    assert content["results"][1]["tokens"] == pytest.approx(content["results"][1]["gpt2_tokens"] * 4.2)
    assert 260 < content["results"][1]["gpt2_tokens"] <= 300
    assert list(tmp_path.iterdir()) == [out]  # the work folder is gone


def test_half_precision_is_for_reading_and_not_for_memories(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[bool, set[torch.dtype]] = {}  # by whether autocast was on
    answers = StreamReader.answers

    def watched(self: Any, rows: Any, new_tokens: int, cache: AtlasCache | None, watch: Any) -> list[str]:
        cache = AtlasCache(len(self.model.model.layers))
        said = answers(self, rows, new_tokens, cache, watch)
        parts = [part for layer in cache.layers if layer.state for part in layer.state.parts.values()]
        memories = [part for part in parts if isinstance(part, MemoryState)]
        weights = [x for memory in memories for name, x in memory.tensors.items() if name.startswith("weights.")]
        read.setdefault(torch.is_autocast_enabled("cpu"), set()).update(x.dtype for x in weights)
        return said

    monkeypatch.setattr(StreamReader, "answers", watched)
    evaluate(request(byte_model, tmp_path / "full.json"), progress=False)
    assert read == {False: {torch.float32}}
    evaluate(request(byte_model, tmp_path / "half.json", precision="bfloat16"), progress=False)
    assert read == {False: {torch.float32}, True: {torch.float32}}


def test_only_whole_steps_are_read_in_half_precision(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged ones have ever new shapes, and on a CPU each in bfloat16 would keep memory."""
    read: set[tuple[bool, bool]] = set()  # whether a step was whole, and autocast on
    forward = AtlasModel.forward

    def watched(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        if others.get("only_cache"):
            read.add((attention_mask is None and input_ids.shape[1] == 50, torch.is_autocast_enabled("cpu")))
        return forward(self, input_ids=input_ids, attention_mask=attention_mask, **others)

    monkeypatch.setattr(AtlasModel, "forward", watched)
    reader, encoder = StreamReader(load_saved(byte_model), TOKENIZER, step=50), Encoder(TOKENIZER)
    (cell,) = stream.cells([100], 2, tasks=["qa2"])
    assert cell.sample is not None
    for numbers in ((0, 1), (0,)):  # side by side: masked; alone: only shorter
        rows = [TokenRow(cell.sample(number), encoder) for number in numbers]
        with torch.autocast("cpu", torch.bfloat16):
            reader.answers(rows, 2, None, lambda *_: None)
    assert read == {(True, True), (False, False)}


def test_rows_side_by_side_are_rows_alone(byte_model: Path) -> None:
    """Of different lengths, with steps that end anywhere."""
    model = AtlasForCausalLM.from_pretrained(byte_model).double().eval()
    reader, encoder = StreamReader(model, TOKENIZER, step=50), Encoder(TOKENIZER)
    (cell,) = stream.cells([100], 4, tasks=["qa2"])
    assert cell.sample is not None
    samples = [cell.sample(number) for number in range(4)]

    def said(chosen: list[Any]) -> list[str]:
        return reader.answers([TokenRow(sample, encoder) for sample in chosen], 12, None, lambda *_: None)

    together = said(samples)
    assert together == [said([sample])[0] for sample in samples]
    assert len({len("".join(sample.pieces())) for sample in samples}) == 4
    whole = TOKENIZER("".join(samples[0].pieces()), return_tensors="pt")["input_ids"]
    made = model.generate(whole, max_new_tokens=12, do_sample=False, pad_token_id=257, eos_token_id=None)
    assert TOKENIZER.decode(made[0, whole.shape[1] :]).split("<|end|>")[0] == together[0]
    assert reader._before_end([65, 256, 66]) == [65]


def test_models_of_others(other_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = evaluate(request(other_model, tmp_path / "out.json", settings={}), progress=False)
    assert len(report.results) == 4
    monkeypatch.setattr(GenerationMixin, "generate", lambda *_, **__: pytest.fail("work was begun"))
    texts = stream.cells([0, 600], 1, tasks=["qa1"])
    with pytest.raises(ValueError, match="takes 2048 tokens, but there is a text of at least 2"):
        evaluate(request(other_model, tmp_path / "long.json", cells=texts), progress=False)
    tokens = [Cell("copying", length, 1, examples=lambda: pytest.fail("work was begun")) for length in (64, 2049)]
    with pytest.raises(ValueError, match="GPT2LMHeadModel takes 2048 tokens, but copying has 2049"):
        evaluate(request(other_model, tmp_path / "long.json", cells=tokens), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def with_beginning() -> PreTrainedTokenizerBase:
    """Bytes, but every text is put between two tokens."""
    tokenizer = byte_tokenizer()
    around = TemplateProcessing(single="<|pad|> $A <|end|>", special_tokens=[("<|end|>", 256), ("<|pad|>", 257)])
    tokenizer.backend_tokenizer.post_processor = around
    return tokenizer


def test_models_of_others_are_given_the_token_that_begins_a_text(
    other_model: Path, byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours have never seen it."""
    read: list[list[int]] = []

    def generate(self: Any, ids: Tensor, **_: Any) -> Tensor:
        read.append(ids[0].tolist())
        return ids

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    (cell,) = stream.cells([0], 1, tasks=["qa1"])
    assert cell.sample is not None
    for source, tokens in ((other_model, [257]), (byte_model, [])):
        tokenizer = with_beginning()
        folder = Path(shutil.copytree(source, tmp_path / source.name))
        tokenizer.save_pretrained(folder)
        row = TokenRow(cell.sample(0), Encoder(load_tokenizer(folder)))
        make_reader(load_any(folder), load_tokenizer(folder), step=50).answers([row], 1, None, lambda *_: None)
        text = list("".join(cell.sample(0).pieces()).encode())
        assert tokenizer.encode("".join(cell.sample(0).pieces())) == [257, *text, 256]
        assert read == ([[*tokens, *text]] if tokens else [])
        read.clear()


def test_what_a_tokenizer_puts_before_a_text() -> None:
    assert beginning(TOKENIZER) == [] and beginning(with_beginning()) == [257]


def test_float32_is_float32_whatever_was_saved(other_model: Path, byte_model: Path, tmp_path: Path) -> None:
    for source in (other_model, byte_model):
        load_any(source).bfloat16().save_pretrained(tmp_path / source.name)
        assert json.loads((tmp_path / source.name / "config.json").read_text())["dtype"] == "bfloat16"
        assert {weight.dtype for weight in load_any(tmp_path / source.name).parameters()} == {torch.float32}
    assert load_saved(tmp_path / byte_model.name).dtype == torch.float32
    with pytest.raises(ValueError, match="is a GPT2LMHeadModel; it must be a model of this library"):
        load_saved(other_model)


def test_token_ids(tmp_path: Path) -> None:
    model = save_small(tmp_path / "model", 256)
    cells = mqar.cells([64], samples=10)
    report = evaluate(Request("mqar", model, cells, tmp_path / "out.json", {}, batch=4), progress=False)
    assert [result.details for result in report.results] == [{"pairs": 4}, {"pairs": 8}, {"pairs": 16}]
    assert all(result.samples == 10 and result.tokens == 64 for result in report.results)
    public = mqar.cells([64], samples=2, scale="public")
    with pytest.raises(
        ValueError, match=r"model has vocab_size=256, but mqar needs 8192; was it trained for this scale"
    ):
        evaluate(Request("mqar", model, [*cells, *public], tmp_path / "out2.json", {}), progress=False)
    assert not (tmp_path / "out2.json.work").exists()


def test_a_vocabulary_too_small_for_the_tokenizer(tmp_path: Path) -> None:
    model = save_small(tmp_path / "model", 256)
    with pytest.raises(ValueError, match="vocab_size=256, but its tokenizer needs 258; was it trained with this tok"):
        evaluate(request(model, tmp_path / "out.json"), progress=False)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from atlas_memory.tasks import reading
from atlas_memory.tasks.work import Finished, WorkFolder
from tests.tasks.test_evaluation import evaluate, request

torch.set_num_threads(1)
reading.SECONDS_UNWATCHED = 0.0  # every step is looked at, and saved
save, saved = WorkFolder.save_reading, []

def save_and_die(self, *arguments):
    save(self, *arguments)
    saved.append(1)
    if len(saved) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

WorkFolder.save_reading = save_and_die
evaluate(request(Path(sys.argv[1]), Path(sys.argv[2]), batch=2, step=100, save_every=0.0), progress=False)
"""


def test_killed_it_goes_on_where_it_was(byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, calm = tmp_path / "out.json", tmp_path / "calm.json"
    # In the middle of a batch, two hundred tokens before its end: not yet so far that this model would have forgotten.
    command = [sys.executable, "-c", KILLED, str(byte_model), str(out), "18"]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    work = WorkFolder(out, request(byte_model, out, batch=2, step=100).all_settings())
    before, reading = work.finished, work.load_reading(1, 0)
    assert reading is not None and all(100 < len(place["waiting"]) < 300 for place in reading[1])
    said: dict[Path, list[list[str]]] = {out: [], calm: []}
    taken = {out: 0, calm: 0}
    take, answers = TokenRow.take, StreamReader.answers
    for file in (out, calm):

        def counting(row: TokenRow, count: int, file: Path = file) -> list[int]:
            taken[file] += 1
            return take(row, count)

        def listening(reader: StreamReader, *arguments: Any, file: Path = file) -> list[str]:
            said[file].append(answers(reader, *arguments))
            return said[file][-1]

        monkeypatch.setattr(TokenRow, "take", counting)
        monkeypatch.setattr(StreamReader, "answers", listening)
        evaluate(request(byte_model, file, batch=2, step=100), progress=False)
    assert before and taken[out] < taken[calm]  # not from the start
    # The first batch that it went on with had been begun; it is answered as by one who read it in one go.
    assert said[out] == said[calm][len(before) :] and len({text for batch in said[out] for text in batch}) > 1
    assert without_times(json.loads(out.read_text())) == without_times(json.loads(calm.read_text()))


def test_work_of_another_evaluation_is_not_taken(byte_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    WorkFolder(out, {"seed": 1}).add(Finished(0, 0, [1.0]))
    with pytest.raises(ValueError, match="holds the work of another evaluation"):
        evaluate(request(byte_model, out), progress=False)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"settings": null, "finished": []}'])
def test_damaged_work_is_named(content: str, byte_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    WorkFolder(out, {}).add(Finished(0, 0, [1.0]))
    (tmp_path / "out.json.work" / "finished.json").write_text(content)
    with pytest.raises(ValueError, match=r"finished\.json' is damaged .* remove the folder to start anew"):
        evaluate(request(byte_model, out), progress=False)


def test_a_file_in_the_place_of_the_work_is_named(byte_model: Path, tmp_path: Path) -> None:
    (tmp_path / "out.json.work").write_text("")
    with pytest.raises(ValueError, match=r"out\.json\.work', where its work would be kept, is a file"):
        evaluate(request(byte_model, tmp_path / "out.json"), progress=False)


def stopped(asked: Request) -> None:
    """Leave the work of one batch."""
    WorkFolder(asked.out, asked.all_settings()).add(Finished(0, 0, [1.0]))


def test_work_with_another_model_is_not_taken(tmp_path: Path) -> None:
    """The folder is the same, but not what is in it."""
    out, model = tmp_path / "out.json", save_small(tmp_path / "model", 320)
    stopped(request(model, out))
    assert WorkFolder(out, request(model, out).all_settings()).finished
    for file in ("config.json", "model.safetensors"):
        content = (model / file).read_bytes()
        (model / file).write_bytes(content + b" ")
        with pytest.raises(ValueError, match=r"work of another evaluation, with model_digest='\w+\.\.\.\w+'; remove"):
            evaluate(request(model, out), progress=False)
        (model / file).write_bytes(content)
    assert WorkFolder(out, request(model, out).all_settings()).finished


@pytest.mark.parametrize("name", ["facts", "background", "book"])
def test_work_with_other_files_is_not_taken(byte_model: Path, tmp_path: Path, name: str) -> None:
    out, file = tmp_path / "out.json", tmp_path / "qa1.txt"
    file.write_text("1 Mary moved to the office.\n")
    asked = request(byte_model, out, settings={name: str(file)})
    stopped(asked)
    assert WorkFolder(out, asked.all_settings()).finished
    file.write_text("1 Mary moved to the garden.\n")
    with pytest.raises(ValueError, match=rf"work of another evaluation, with {name}_digest="):
        evaluate(asked, progress=False)


def test_what_is_compared_is_in_the_report(byte_model: Path, tmp_path: Path) -> None:
    asked = request(byte_model, tmp_path / "out.json", settings={"facts": "simulator", "background": "builtin"})
    report = evaluate(asked, progress=False)
    compared = asked.all_settings()
    assert report.settings.keys() == compared.keys() - {"evaluation", "model"}
    assert {"model_digest", "facts_digest", "background_digest", "batch", "precision"} < report.settings.keys()
    assert {"evaluation": report.name, "model": report.model, **report.settings} == compared
    assert set(json.loads((tmp_path / "out.json").read_text())) == {"model", "evaluation", "settings", "results"}


def test_a_finished_report_is_of_the_same_request(tmp_path: Path) -> None:
    out, model = tmp_path / "out.json", save_small(tmp_path / "model", 320)
    asked = request(model, out)
    assert finished_report(asked) is None
    report = evaluate(asked, progress=False)
    assert finished_report(asked) == report
    assert finished_report(request(model, out, batch=2, step=8)) == report  # the same answers, at another pace
    for fields in ({"precision": "bfloat16"}, {"name": "niah"}, {"settings": {"seed": 1}}):
        assert finished_report(request(model, out, **fields)) is None
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content + b" ")
    assert finished_report(asked) is None
    (model / "model.safetensors").write_bytes(content)
    for text in ("nothing", "[]"):
        out.write_text(text)
        assert finished_report(asked) is None


def test_progress_is_never_more_than_all(byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts alone are longer than 0K."""
    bars: list[evaluation._Bar] = []
    advance = evaluation._Bar.advance

    def watched(bar: evaluation._Bar, *arguments: Any) -> None:
        advance(bar, *arguments)
        bars.append(bar)
        (task,) = bar.shown.tasks
        assert task.total is not None and task.completed <= task.total

    monkeypatch.setattr(evaluation._Bar, "advance", watched)
    cells = stream.cells([0], 3, tasks=["qa1"])
    (result,) = evaluate(request(byte_model, tmp_path / "out.json", cells=cells), progress=False).results
    assert bars[-1].shown.tasks[0].total == pytest.approx(3 * result.gpt2_tokens)


def test_a_refusal_is_short(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    WorkFolder(out, {"same": 1, "files": {str(number): "x" * 99 for number in range(99)}}).add(Finished(0, 0))
    with pytest.raises(ValueError, match=r"with files=\{.*\}, seed=None; remove") as refusal:
        WorkFolder(out, {"same": 1, "seed": 2})
    assert len(str(refusal.value)) < 700 and "same" not in str(refusal.value)


def test_requests_are_checked_before_any_work(byte_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json; accepted: a folder written by save_pretrained"):
        request(tmp_path, tmp_path / "out.json")
    with pytest.raises(ValueError, match="precision='float8' is not a choice; allowed: float32, bfloat16"):
        request(byte_model, tmp_path / "out.json", precision="float8")
    with pytest.raises(ValueError, match="batch=0 must be a whole number"):
        request(byte_model, tmp_path / "out.json", batch=0)
    with pytest.raises(ValueError, match="does not exist"):
        request(byte_model, tmp_path / "absent" / "out.json")
    assert os.listdir(tmp_path) == []
