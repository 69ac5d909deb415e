from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atlas_memory.data import load_tokenizer, read_documents, train_tokenizer
from atlas_memory.data.options import SourceConfig
from atlas_memory.data.tokenizers import END, PAD, Encoder, byte_tokenizer, end_token, pieces
from tests.conftest import SHARED

CORPUS = ["the memory reads the memory\n", "naïve 日本 🙂 the the the", "def read(memory):\r\n\treturn memory\n"] * 20
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_tokenizer(CORPUS, 300, tmp_path_factory.mktemp("tokenizer") / "bpe", progress=False)


@pytest.fixture(scope="module")
def encoders(trained: Any) -> list[Encoder]:
    through_tokenizers = Encoder(byte_tokenizer())
    through_tokenizers._bytes = False  # the general way, which the quick one must agree with
    return [Encoder(byte_tokenizer()), through_tokenizers, Encoder(trained)]


@given(text=TEXTS)
@example(f"a {END} b{PAD}")
@example("\x00\r\n  \t n't . ,")
@example("")
def test_any_text_comes_back(trained: Any, encoders: list[Encoder], text: str) -> None:
    for encoder, tokenizer in zip(encoders, (byte_tokenizer(), byte_tokenizer(), trained), strict=True):
        (ids,) = encoder.encode([text])
        assert ids[-1] == encoder.end
        assert encoder.end not in ids[:-1]
        assert encoder.pad not in ids[:-1]
        assert tokenizer.decode(ids[:-1].tolist()) == text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert encoders[0].encode([text])[0][:-1].tolist() == list(text.encode())


@given(texts=st.lists(TEXTS, max_size=5))
def test_the_quick_way_for_bytes_is_the_general_one(encoders: list[Encoder], texts: list[str]) -> None:
    quick, general, _ = (encoder.encode(texts) for encoder in encoders)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(quick, general, strict=True))
    assert all(ids.dtype == np.uint16 for ids in quick)


def test_every_byte_has_its_own_id() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 258
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257)
    assert sorted(tokenizer.get_vocab().values()) == list(range(258))
    everything = "".join(chr(code) for code in range(0x800))
    assert tokenizer.encode(everything) == list(everything.encode())


def test_bytes_save_beside_a_model_and_load_again(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert Encoder(loaded).fingerprint == Encoder(tokenizer).fingerprint
    assert Encoder(loaded)._bytes
    assert loaded.decode(loaded.encode("héllo n't .")) == "héllo n't ."


def test_training_is_deterministic_and_compresses(trained: Any, tmp_path: Path) -> None:
    again = train_tokenizer(iter(CORPUS), 300, tmp_path / "again", progress=False)
    assert Encoder(again).fingerprint == Encoder(trained).fingerprint
    assert Encoder(load_tokenizer(tmp_path / "again")).fingerprint == Encoder(trained).fingerprint
    assert len(trained) <= 300
    assert len(trained.encode(CORPUS[0])) < len(CORPUS[0]) / 2
    other = train_tokenizer(["something else altogether"] * 9, 300, tmp_path / "other", progress=False)
    assert Encoder(other).fingerprint != Encoder(trained).fingerprint


def test_encoders_travel(encoders: list[Encoder]) -> None:
    for encoder in encoders:
        encoder.encode(["once"])
        sent = pickle.loads(pickle.dumps(encoder))
        assert np.array_equal(sent.encode(CORPUS)[1], encoder.encode(CORPUS)[1])


def test_tokenizers_without_a_definition_are_asked_directly(trained: Any) -> None:
    class Slow:
        eos_token_id, pad_token_id = trained.eos_token_id, None

        def get_vocab(self) -> dict[str, int]:
            return dict(trained.get_vocab())

        def __call__(self, texts: list[str], **options: Any) -> Any:
            assert options["split_special_tokens"] and not options["add_special_tokens"]
            return trained(texts, add_special_tokens=False)

    slow: Any = Slow()
    encoder = Encoder(slow)
    assert np.array_equal(encoder.encode(CORPUS)[0], Encoder(trained).encode(CORPUS)[0])
    assert encoder.pad == encoder.end
    assert encoder.fingerprint == Encoder(slow).fingerprint


def test_pieces_show_what_each_token_stands_for() -> None:
    assert pieces(byte_tokenizer(), "aß") == [(97, "a"), (195, "�"), (159, "�")]


def test_bad_requests_fail_before_any_work(tmp_path: Path) -> None:
    never: Any = None
    with pytest.raises(ValueError, match="vocabulary=257 must be a whole number of at least 258"):
        train_tokenizer(never, 257, tmp_path / "new")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="exists; it must be a new or an empty folder"):
        train_tokenizer(never, 300, tmp_path)
    with pytest.raises(ValueError, match=r"is a folder without tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos, sep or bos token"):
        end_token(tokenizer)


@pytest.mark.shared
def test_novels_come_back(encoders: list[Encoder], trained: Any) -> None:
    for text, _ in read_documents(SourceConfig("text", str(SHARED / "data" / "books"), limit=2)):
        for encoder, tokenizer in ((encoders[0], byte_tokenizer()), (encoders[2], trained)):
            assert tokenizer.decode(encoder.encode([text])[0][:-1].tolist()) == text
