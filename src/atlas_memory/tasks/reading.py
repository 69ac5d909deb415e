"""Samples through a model: rows of different texts read side by side, a step at a time, and what it says at their ends.

Shapes: B rows, T tokens of a step.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from atlas_memory.data.tokenizers import Encoder, beginning
from atlas_memory.models import AtlasCache, AtlasForCausalLM
from atlas_memory.models.reading import DEFAULT_STEP
from atlas_memory.tasks.samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PIECES_AT_ONCE = 64  # given to the tokenizer together
SECONDS_UNWATCHED = 5.0  # of reading, between two looks at it

# Called every few seconds, between steps, with the rows and the cache: may save them, and shows progress.
Watcher = Callable[["Sequence[TokenRow]", AtlasCache], None]


class TokenRow:
    """The token ids of one sample's text as they are asked for; the last is kept back: with it the answer begins."""

    def __init__(self, sample: Sample, encoder: Encoder, pieces: int = 0, waiting: Sequence[int] = ()) -> None:
        self._encoder = encoder
        self.pieces = pieces  # taken from the sample so far
        self.waiting = list(waiting)  # tokens of those pieces that nobody has taken yet
        self.tokens = 0  # taken, over the life of this object
        self.characters = 0
        self._texts = itertools.islice(sample.pieces(), pieces, None)

    def holds(self, count: int) -> bool:
        """Whether there are so many tokens, and the last one."""
        while len(self.waiting) <= count and (texts := list(itertools.islice(self._texts, _PIECES_AT_ONCE))):
            self.pieces += len(texts)
            self.characters += sum(map(len, texts))
            for ids in self._encoder.pieces(texts):
                self.waiting += ids
        return len(self.waiting) > count

    def take(self, count: int) -> list[int]:
        """The next tokens, at most `count`; none when only the last one is left."""
        self.holds(count)
        taken = self.waiting[: max(0, min(count, len(self.waiting) - 1))]
        del self.waiting[: len(taken)]
        self.tokens += len(taken)
        return taken

    def rest(self) -> list[int]:
        """The last token, which `take` keeps back: for a text that no answer follows."""
        taken, self.waiting = self.waiting, []
        self.tokens += len(taken)
        return taken

    def place(self) -> dict[str, Any]:
        """All it takes to go on from here, with the sample."""
        return {"pieces": self.pieces, "waiting": self.waiting}


def answer_tokens(samples: Sequence[Sample], encoder: Encoder) -> int:
    """How many tokens to generate: the longest answer with the token after it, and what samples give in addition."""
    answers = encoder.encode([sample.answer for sample in samples])
    return max(len(ids) + sample.extra_tokens for ids, sample in zip(answers, samples, strict=True))


def room_of(model: PreTrainedModel) -> float:
    """How many tokens a model takes; ours take any number."""
    room: int | None = getattr(model.config, "max_position_embeddings", None)
    return math.inf if room is None else room


class Reader(Protocol):
    """Reads rows to their ends and says how each goes on.

    check: raises if a row, which it takes from, is longer than can be read.
    """

    def answers(
        self, rows: Sequence[TokenRow], new_tokens: int, cache: AtlasCache | None, watch: Watcher
    ) -> list[str]: ...

    def check(self, row: TokenRow, new_tokens: int) -> None: ...


def make_reader(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, step: int = DEFAULT_STEP) -> Reader:
    """Our models read in constant memory; others are given the whole text."""
    return (
        StreamReader(model, tokenizer, step) if isinstance(model, AtlasForCausalLM) else WholeReader(model, tokenizer)
    )


class StreamReader:
    """All rows side by side, carried in one cache."""

    def __init__(self, model: AtlasForCausalLM, tokenizer: PreTrainedTokenizerBase, step: int) -> None:
        self.model, self._tokenizer, self._step = model, tokenizer, step
        encoder = Encoder(tokenizer)
        self._pad, self._end = encoder.pad, encoder.end

    @torch.inference_mode()
    def answers(self, rows: Sequence[TokenRow], new_tokens: int, cache: AtlasCache | None, watch: Watcher) -> list[str]:
        cache = AtlasCache(len(self.model.model.layers)) if cache is None else cache
        while all(row.holds(self._step) for row in rows):
            self.model.read(self._whole_steps(rows), cache, step=self._step, progress=False)
            watch(rows, cache)
        while any(taken := [row.take(self._step) for row in rows]):
            self._read_ends(taken, cache)
            watch(rows, cache)
        said: list[Tensor] = []
        ids = torch.tensor([row.waiting for row in rows], device=self.model.device)  # (B, 1)
        for _ in range(new_tokens):
            outputs = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = outputs.logits[:, -1].argmax(-1, keepdim=True)
            said.append(ids)
        return [str(self._tokenizer.decode(self._before_end(ids))) for ids in torch.cat(said, dim=1).tolist()]

    def check(self, row: TokenRow, new_tokens: int) -> None:
        """No text is too long."""

    def _before_end(self, ids: list[int]) -> list[int]:
        return ids[: ids.index(self._end)] if self._end in ids else ids

    def _whole_steps(self, rows: Sequence[TokenRow]) -> Iterator[Tensor]:
        """The next steps (B, step) of which every row has all tokens, at least one, and for a few seconds."""
        begin = time.perf_counter()
        while all(row.holds(self._step) for row in rows):
            yield torch.tensor([row.take(self._step) for row in rows])
            if time.perf_counter() - begin > SECONDS_UNWATCHED:
                return

    def _read_ends(self, taken: list[list[int]], cache: AtlasCache) -> None:
        """A step of which some rows have less than all; in float32, whatever was chosen for whole ones.

        On a CPU oneDNN keeps memory for every shape of matrices in bfloat16 that it has ever multiplied. Whole steps
        have one shape; the ends of texts have as many as there are texts, and memory would grow with every batch.
        """
        longest = max(map(len, taken))
        padded = torch.tensor([ids + [self._pad] * (longest - len(ids)) for ids in taken])  # (B, T)
        mask = torch.arange(longest) < torch.tensor([len(ids) for ids in taken])[:, None]
        device = self.model.device
        with torch.autocast(device.type, enabled=False):
            self.model.model(
                input_ids=padded.to(device), attention_mask=mask.to(device), past_key_values=cache, only_cache=True
            )


class WholeReader:
    """One row at a time, as a whole: no model here is asked to ignore padding."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self._tokenizer = model, tokenizer
        self._beginning = beginning(tokenizer)  # models of others have learned from texts that begin with it

    @torch.inference_mode()
    def answers(self, rows: Sequence[TokenRow], new_tokens: int, cache: AtlasCache | None, watch: Watcher) -> list[str]:
        model: Any = self.model
        said = []
        for row in rows:
            ids = torch.tensor([self._ids(row, new_tokens)], device=model.device)
            pad = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else 0
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=pad
            )
            said.append(str(self._tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)))
        return said

    def check(self, row: TokenRow, new_tokens: int) -> None:
        self._ids(row, new_tokens)

    def _ids(self, row: TokenRow, new_tokens: int) -> list[int]:
        """A whole text after what begins it; of one that is too long, not much more than there is room for."""
        room, ids = room_of(self.model), [*self._beginning]
        while len(ids) <= room and (taken := row.take(DEFAULT_STEP)):
            ids += taken
        ids += row.waiting
        if len(ids) + new_tokens > room:
            raise ValueError(
                f"model: {type(self.model).__name__} takes {room} tokens, but there is a text of at least {len(ids)}, "
                f"and {new_tokens} for its answer; give shorter --lengths."
            )
        return ids
