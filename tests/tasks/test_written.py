"""Sentences in which a model writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from atlas_memory import AtlasForCausalLM
from atlas_memory.cli import app
from atlas_memory.data import load_tokenizer
from atlas_memory.tasks.background import all_sentences
from atlas_memory.tasks.written import BLOCK, BLOCKS, Block, find_written
from atlas_memory.train.learner import watched

SENTENCES = [f"The {number}th of many sentences, {'very ' * (number % 7)}long." for number in range(200)]


def test_amounts_are_what_the_gates_let_through(byte_model: Path) -> None:
    model, tokenizer = AtlasForCausalLM.from_pretrained(byte_model).eval(), load_tokenizer(byte_model)
    blocks: list[Block] = []
    found = list(find_written(model, tokenizer, SENTENCES, watch=blocks.extend))  # smooth gates: they always write
    assert [written.sentence for written in found] == SENTENCES
    assert len(blocks) > BLOCKS and all(block.tokens <= BLOCK for block in blocks)
    written = iter(found)
    for block in blocks:  # each alone, without padding
        tokens = torch.tensor([[token for ids in block.ids for token in ids]])
        with torch.no_grad(), watched(model) as monitors:
            model.model(input_ids=tokens, use_cache=False)
        expected = sum(float(monitor.mean_write) * monitor.writes[0].numel() for monitor in monitors)
        assert sum(next(written).amount for _ in block.sentences) == pytest.approx(expected, rel=1e-4)


def test_a_passage_is_a_sentence_with_its_neighbours(byte_model: Path) -> None:
    model, tokenizer = AtlasForCausalLM.from_pretrained(byte_model).eval(), load_tokenizer(byte_model)
    found = list(find_written(model, tokenizer, SENTENCES[:4]))
    assert [written.passage for written in found[:2]] == [" ".join(SENTENCES[:2]), " ".join(SENTENCES[:3])]
    amounts = sorted(written.amount for written in found)
    more = list(find_written(model, tokenizer, SENTENCES[:4], above=amounts[1]))
    assert sorted(written.amount for written in more) == amounts[2:]


def test_a_long_sentence_is_cut_and_an_empty_text_has_none(byte_model: Path) -> None:
    model, tokenizer = AtlasForCausalLM.from_pretrained(byte_model).eval(), load_tokenizer(byte_model)
    blocks: list[Block] = []
    assert len(list(find_written(model, tokenizer, ["x" * 3 * BLOCK, "y"], watch=blocks.extend))) == 2
    assert [block.tokens for block in blocks] == [BLOCK, 2]
    assert not list(find_written(model, tokenizer, []))


def test_the_command_writes_passages_and_shows_the_strongest(byte_model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "book.txt", tmp_path / "out.txt"
    text.write_text(" ".join(f"Sentence {number} is long enough to be kept in a [background]." for number in range(30)))
    arguments = ["writes", str(text), "--model", str(byte_model), "--out", str(out), "--show", "3", "--quiet"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "30 sentences" in result.stdout and result.stdout.count("[background]") == 3
    assert len(out.read_text().splitlines()) == 30
    assert list(all_sentences([text]))[:2] == out.read_text().splitlines()[0].replace("]. S", "].|S").split("|")


def test_no_empty_file_is_left(byte_model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "book.txt", tmp_path / "out.txt"
    text.write_text("A sentence that is long enough to be kept in a background.")
    arguments = ["writes", str(text), "--model", str(byte_model), "--above", "1e6", "--quiet"]
    assert "0 sentences" in CliRunner().invoke(app, arguments).stdout
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 2 and not out.exists()
    assert f"error: out={str(out)!r} would be empty" in result.stderr and "the model wrote nothing" in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "absent.txt"}, "error: text='absent.txt'"),
        ({"--model": "absent"}, "error: model='absent'"),
        ({"--out": "absent/out.txt", "--model": "absent"}, "error: out='absent/out.txt'"),  # before anything is read
    ],
)
def test_bad_requests_name_the_argument(change: dict[str, str], message: str, byte_model: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("A sentence that is long enough to be kept in a background.")
    chosen = {"text": str(tmp_path / "book.txt"), "--model": str(byte_model)} | change
    text = chosen.pop("text")
    result = CliRunner().invoke(app, ["writes", text, *(part for option in chosen.items() for part in option)])
    assert result.exit_code == 2 and message in result.stderr


def test_a_model_without_memory_is_refused(byte_model: Path) -> None:
    config = AtlasForCausalLM.from_pretrained(byte_model).config
    config.layer_types, config.preset = ["sliding_attention"] * 2, None
    with pytest.raises(ValueError, match="no memory"):
        list(find_written(AtlasForCausalLM(config), load_tokenizer(byte_model), SENTENCES))
