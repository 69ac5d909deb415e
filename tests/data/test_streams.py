"""Streams in pieces have the ids of the whole text."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from atlas_memory.data import load_tokenizer, train_tokenizer
from atlas_memory.data.streams import token_pieces

TEXT = "A memory, which  learns\twhile it reads:\n\n  naïve — but 3.14 times faster!\n" * 4


def marked_tokenizer() -> PreTrainedTokenizerBase:
    """As Llama's: spaces are marks, and one is put before every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = [word.replace(" ", "▁") for word in re.findall(r"\s*\S+", TEXT)]
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=120, special_tokens=["?", "<end>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="?")


@pytest.mark.parametrize("piece", [20, 37, 10_000])
@pytest.mark.parametrize("kind", ["bytes", "trained", "marked"])
def test_pieces_are_the_whole(tmp_path: Path, kind: str, piece: int) -> None:
    if kind == "bytes":
        tokenizer = load_tokenizer("bytes")
    elif kind == "marked":
        tokenizer = marked_tokenizer()
    else:
        tokenizer = train_tokenizer([TEXT], 300, tmp_path / "tokenizer", progress=False)
    found = [token for part in token_pieces(io.StringIO(TEXT), tokenizer, piece) for token in part]
    assert found == tokenizer.encode(TEXT, add_special_tokens=False)


def test_nothing_gives_nothing() -> None:
    assert list(token_pieces(io.StringIO(""), load_tokenizer("bytes"))) == []


def test_a_stream_is_read_no_further_than_needed() -> None:
    stream = io.StringIO("word " * 1000)
    next(token_pieces(stream, load_tokenizer("bytes"), 50))
    assert stream.tell() == 50
