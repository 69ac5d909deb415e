"""Evaluation: rows read side by side, and scored."""

from __future__ import annotations

import json
import os
import shutil
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
from atlas_memory.tasks.evaluation import Request, evaluate
from atlas_memory.tasks.reading import StreamReader, TokenRow, make_reader
from atlas_memory.tasks.samples import Cell
from tests.tasks.conftest import request, save_small

TOKENIZER = byte_tokenizer()


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


def test_what_is_compared_is_in_the_report(byte_model: Path, tmp_path: Path) -> None:
    asked = request(byte_model, tmp_path / "out.json", settings={"facts": "simulator", "background": "builtin"})
    report = evaluate(asked, progress=False)
    compared = asked.all_settings()
    assert report.settings.keys() == compared.keys() - {"evaluation", "model"}
    assert {"model_digest", "facts_digest", "background_digest", "batch", "precision"} < report.settings.keys()
    assert {"evaluation": report.name, "model": report.model, **report.settings} == compared
    assert set(json.loads((tmp_path / "out.json").read_text())) == {"model", "evaluation", "settings", "results"}


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
