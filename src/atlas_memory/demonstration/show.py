"""Reading a scene and asking about it, with the memory's own numbers on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atlas_memory.data import load_tokenizer
from atlas_memory.data.tokenizers import Encoder
from atlas_memory.demonstration.scene import Question, Scene
from atlas_memory.models import AtlasCache
from atlas_memory.models.saved import load_saved
from atlas_memory.tasks.lengths import tokens_of
from atlas_memory.tasks.precision import PRECISIONS
from atlas_memory.tasks.reading import StreamReader, TokenRow, answer_tokens
from atlas_memory.tasks.samples import Sample, exact_match, up_to_stop

STEP = 4096  # tokens read at once


class Reading(NamedTuple):
    """How far a model is."""

    gpt2_tokens: float
    tokens: int  # the model's own
    seconds: float
    state_bytes: int


class Answered(NamedTuple):
    question: Question
    said: str
    right: bool


class Show:
    """A saved model that reads one scene. precision: it is read in; questions are always in float32."""

    def __init__(self, folder: Path, precision: str = PRECISIONS[0]) -> None:
        self.model, self._half = load_saved(folder), precision == "bfloat16"
        self.tokenizer = load_tokenizer(folder)
        self._encoder = Encoder(self.tokenizer)
        self._cache = AtlasCache(len(self.model.model.layers))

    @property
    def reach(self) -> int:
        """How many tokens back a model of windows alone sees at most: two in a layer, one in a memory's place."""
        return int(2 * self.model.config.sliding_window * self.model.config.num_hidden_layers)

    def read(self, scene: Scene, last: int | None = None) -> Iterator[Reading]:
        """Read it from its beginning, a step at a time. last: only so many characters before its end."""
        pieces = scene.pieces if last is None else lambda: _tail(scene, last)
        row = TokenRow(Sample(pieces, "", exact_match), self._encoder)
        self._cache, begin = AtlasCache(len(self.model.model.layers)), time.perf_counter()
        while taken := row.take(STEP) or row.rest():
            with torch.inference_mode(), torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._half):
                self.model.read(torch.tensor([taken]), self._cache, step=STEP, progress=False)
            seconds = time.perf_counter() - begin
            yield Reading(tokens_of(row.characters), row.tokens, seconds, self._cache.nbytes)

    def ask(self, questions: Sequence[Question]) -> list[Answered]:
        """All questions after the same text; none of them hears of the others."""
        asked = self._cache.copy()
        asked.batch_select_indices(torch.zeros(len(questions), dtype=torch.long))
        samples = [Sample(_said(f" {q.text}"), q.answer, exact_match) for q in questions]
        rows, most = [TokenRow(sample, self._encoder) for sample in samples], answer_tokens(samples, self._encoder)
        said = StreamReader(self.model, self.tokenizer, STEP).answers(rows, most, asked, lambda rows, cache: None)
        return [
            Answered(question, up_to_stop(text), exact_match(text, question.answer))
            for question, text in zip(questions, said, strict=True)
        ]


def _said(text: str) -> Any:
    return lambda: iter([text])


def _tail(scene: Scene, characters: int) -> Iterator[str]:
    """The last pieces of a scene, at least so many characters."""
    kept: list[str] = []
    size = 0
    for piece in scene.pieces():
        kept.append(piece)
        size += len(piece)
        while kept and size - len(kept[0]) >= characters:
            size -= len(kept.pop(0))
    return iter(kept)
