"""Tokenizers: text → token ids. Bytes, any tokenizer of Hugging Face, and training one."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_memory.data.folders import replace_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

END, PAD = "<|end|>", "<|pad|>"
BYTES = "bytes"
_WORD = "a"  # any
SMALLEST_VOCABULARY = 256 + len((END, PAD))


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """`bytes`, the folder of a saved tokenizer, or a name on the hub."""
    if str(name_or_path) == BYTES:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    folder = Path(name_or_path)
    if folder.is_dir() and not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"tokenizer={str(name_or_path)!r} is a folder without tokenizer.json.")
    try:
        return AutoTokenizer.from_pretrained(str(name_or_path))
    except (OSError, ValueError, KeyError) as error:  # the last: of a file that is no tokenizer's
        raise ValueError(
            f"tokenizer={str(name_or_path)!r} could not be loaded; accepted: bytes, a folder with tokenizer.json, "
            f"or a name on the hub. {error}"
        ) from error


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Token id = byte of the UTF-8 text; 256 ends a document, 257 pads. Saves and loads like any other tokenizer."""
    from tokenizers import Tokenizer, models

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    return _finished(tokenizer, split_words=False)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers: itself, or one from 256 on."""
    characters, substitute = [], 256
    for byte in range(256):
        visible = chr(byte).isprintable() and chr(byte) != " "
        characters.append(chr(byte) if visible else chr(substitute))
        substitute += not visible
    return characters


def _finished(tokenizer: Tokenizer, *, split_words: bool) -> PreTrainedTokenizerBase:
    """Byte-level reading and writing, the two special tokens, and the interface of transformers."""
    from tokenizers import AddedToken, decoders
    from transformers import PreTrainedTokenizerFast

    tokenizer.pre_tokenizer = _byte_level(split_words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (END, PAD)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _byte_level(split_words: bool) -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)


def train_tokenizer(
    documents: Iterable[str], vocabulary: int, out: str | Path, *, progress: bool = True
) -> PreTrainedTokenizerBase:
    """Byte-level BPE of at most `vocabulary` tokens, saved to the folder `out`. Equal documents give equal ones."""
    check_trainable(vocabulary, out)
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _byte_level(split_words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len((END, PAD)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(documents, trainer)
    trained = _finished(tokenizer, split_words=True)
    with replace_folder(Path(out)) as folder:
        trained.save_pretrained(folder)
    return trained


def check_trainable(vocabulary: int, out: str | Path) -> None:
    """Raise before any work where a tokenizer could not be trained or saved."""
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or vocabulary < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocabulary={vocabulary!r} must be a whole number of at least {SMALLEST_VOCABULARY}: "
            "every byte, the end of a document and padding."
        )
    folder = Path(out)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"out={str(out)!r} exists; it must be a new or an empty folder.")


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends a document."""
    for name in ("eos_token_id", "sep_token_id", "bos_token_id"):
        token: int | None = getattr(tokenizer, name)
        if token is not None:
            return token
    raise ValueError("tokenizer has no eos, sep or bos token to end a document with; set tokenizer.eos_token.")


def pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, str]]:
    """Every token of a text and what it stands for; a part of a character is shown as U+FFFD."""
    return [(token, str(tokenizer.decode([token]))) for token in tokenizer.encode(text, add_special_tokens=False)]


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id; `len(tokenizer)` counts tokens, and ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What a tokenizer puts before a text, such as a token that begins it; our own put nothing there."""
    plain, whole = (tokenizer.encode(_WORD, add_special_tokens=special) for special in (False, True))
    places = range(len(whole) - len(plain) + 1)
    return whole[: next(place for place in places if whole[place : place + len(plain)] == plain)]


class Encoder:
    """A tokenizer reduced to what encoding documents takes; goes to worker processes by pickle.

    Special tokens spelled out in a document are read as ordinary text: a document cannot end itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.end, self.vocabulary = end_token(tokenizer), vocabulary_size(tokenizer)
        self.pad = self.end if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        self.dtype = np.dtype(np.uint16 if self.vocabulary <= 2**16 else np.uint32).newbyteorder("<")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._definition: str | None = None if backend is None else backend.to_str()
        self._slow = tokenizer if backend is None else None
        self._bytes = self._definition is not None and self._definition == _byte_definition()
        self._backend: Tokenizer | None = None

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that encode equally."""
        described: Any = self._definition
        if self._slow is not None:
            described = [type(self._slow).__name__, sorted(self._slow.get_vocab().items())]
        return hashlib.sha256(json.dumps([described, self.end, self.pad]).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, and the token that ends a document."""
        return [np.append(ids, self.end).astype(self.dtype) for ids in self._ids(texts)]

    def pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of pieces of a text, without the token that ends a document: those of the whole, if pieces that go on
        begin with white space, where words are split.

        Some tokenizers put a mark before every text; in the middle of one it would stand for a space that is not there.
        """
        if not self._marks_beginnings:
            return [ids.tolist() for ids in self._ids(texts)]
        going_on = [text[:1].isspace() for text in texts]
        after_a_word = [f"{_WORD}{text}" if goes_on else text for text, goes_on in zip(texts, going_on, strict=True)]
        word = len(next(iter(self._ids([_WORD]))))
        return [ids.tolist()[word * goes_on :] for ids, goes_on in zip(self._ids(after_a_word), going_on, strict=True)]

    @functools.cached_property
    def _marks_beginnings(self) -> bool:
        first, second, whole = (ids.tolist() for ids in self._ids([_WORD, f" {_WORD}", f"{_WORD} {_WORD}"]))
        return bool(first + second != whole)

    def _ids(self, texts: Sequence[str]) -> Iterable[Any]:
        if self._bytes:  # a thousand times faster, and tested to be the same
            return (np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts)
        if self._slow is not None:
            encoded = self._slow(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)
            return (np.array(ids, self.dtype) for ids in encoded["input_ids"])
        if self._backend is None:
            self._backend = _plain_backend(str(self._definition))
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return (np.array(encoding.ids, self.dtype) for encoding in found)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_backend": None}


def _byte_definition() -> str:
    return str(byte_tokenizer().backend_tokenizer.to_str())


def _plain_backend(definition: str) -> Tokenizer:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(definition)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend
