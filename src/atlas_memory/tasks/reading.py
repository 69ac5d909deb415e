"""Samples through a model: rows of different texts read side by side, a step at a time, and what it says at their ends.

Shapes: B rows, T tokens of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from atlas_memory.data.tokenizers import Encoder
from atlas_memory.models import AtlasCache, AtlasForCausalLM
from atlas_memory.models.reading import DEFAULT_STEP
from atlas_memory.tasks.samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PIECES_AT_ONCE = 64  # given to the tokenizer together

# Called between steps with the rows and the cache: may save them, and shows progress.
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

    def take(self, count: int) -> list[int]:
        """The next tokens, at most `count`; none when only the last one is left."""
        while len(self.waiting) <= count and (texts := list(itertools.islice(self._texts, _PIECES_AT_ONCE))):
            self.pieces += len(texts)
            self.characters += sum(map(len, texts))
            for ids in self._encoder.pieces(texts):
                self.waiting += ids
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


class Reader(Protocol):
    """Reads rows to their ends and says how each goes on."""

    def answers(
        self, rows: Sequence[TokenRow], new_tokens: int, cache: AtlasCache | None, watch: Watcher
    ) -> list[str]: ...


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
        while any(taken := [row.take(self._step) for row in rows]):
            self._read(taken, cache)
            watch(rows, cache)
        said: list[Tensor] = []
        ids = torch.tensor([row.waiting for row in rows], device=self.model.device)  # (B, 1)
        for _ in range(new_tokens):
            outputs = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = outputs.logits[:, -1].argmax(-1, keepdim=True)
            said.append(ids)
        return [str(self._tokenizer.decode(self._before_end(ids))) for ids in torch.cat(said, dim=1).tolist()]

    def _before_end(self, ids: list[int]) -> list[int]:
        return ids[: ids.index(self._end)] if self._end in ids else ids

    def _read(self, taken: list[list[int]], cache: AtlasCache) -> None:
        longest = max(map(len, taken))
        padded = torch.tensor([ids + [self._pad] * (longest - len(ids)) for ids in taken])  # (B, T)
        lengths = torch.tensor([len(ids) for ids in taken])
        if bool((lengths == longest).all()):
            self.model.read(padded, cache, step=longest, progress=False)
        else:
            mask = torch.arange(longest) < lengths[:, None]
            device = self.model.device
            self.model.model(
                input_ids=padded.to(device), attention_mask=mask.to(device), past_key_values=cache, only_cache=True
            )


class WholeReader:
    """One row at a time, as a whole: no model here is asked to ignore padding."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self._tokenizer = model, tokenizer

    @torch.inference_mode()
    def answers(self, rows: Sequence[TokenRow], new_tokens: int, cache: AtlasCache | None, watch: Watcher) -> list[str]:
        model: Any = self.model
        said = []
        for row in rows:
            ids = torch.tensor([[*self._all(row), *row.waiting]], device=model.device)
            room = getattr(model.config, "max_position_embeddings", None)
            if room is not None and ids.shape[1] + new_tokens > room:
                raise ValueError(
                    f"model: {type(model).__name__} takes {room} tokens, but this text has {ids.shape[1]}; "
                    "give shorter --lengths."
                )
            pad = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else 0
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=pad
            )
            said.append(str(self._tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)))
        return said

    @staticmethod
    def _all(row: TokenRow) -> Iterator[int]:
        while taken := row.take(DEFAULT_STEP):
            yield from taken
