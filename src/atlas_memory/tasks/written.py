"""Sentences in which a model writes: what its memory takes to be worth keeping.

Where a text holds nothing to be kept, they are what leaks into the memory, and what to train against: as the background
of further lessons, `recipes/babilong-settled.yaml`, they come many times as often as in the text itself.

Shapes: B blocks of sentences, T tokens, H heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from atlas_memory.data.tokenizers import Encoder
from atlas_memory.models import AtlasForCausalLM
from atlas_memory.train.learner import watched

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Item = TypeVar("_Item")

BLOCK = 512  # tokens read from an empty memory
BLOCKS = 8  # side by side
_SENTENCES_AT_ONCE = 64  # given to the tokenizer together


class Written(NamedTuple):
    """A sentence in which something was written."""

    amount: float  # η·γ, the sum over its tokens, all layers and heads
    sentence: str
    passage: str  # with the sentences before and after it


class Block(NamedTuple):
    """Sentences that follow each other, about `BLOCK` tokens in all."""

    sentences: list[str]
    ids: list[list[int]]  # of each sentence

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def passage(self, place: int) -> str:
        return " ".join(self.sentences[max(place - 1, 0) : place + 2])


# Called with every few blocks that were read: shows progress.
Watcher = Callable[[Sequence[Block]], None]


def find_written(
    model: AtlasForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Iterable[str],
    above: float = 0.0,
    watch: Watcher = lambda blocks: None,
) -> Iterator[Written]:
    """In the order of the text, every sentence with more than `above` written in it."""
    encoder = Encoder(tokenizer)
    for blocks in _few(_blocks(sentences, encoder), BLOCKS):
        for block, amounts in zip(blocks, _amounts(model, blocks, encoder.pad), strict=True):
            for place, amount in enumerate(amounts):
                if amount > above:
                    yield Written(amount, block.sentences[place], block.passage(place))
        watch(blocks)


def _few(items: Iterable[_Item], number: int) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while few := list(itertools.islice(iterator, number)):
        yield few


def _blocks(sentences: Iterable[str], encoder: Encoder) -> Iterator[Block]:
    block = Block([], [])
    for few in _few(sentences, _SENTENCES_AT_ONCE):
        for sentence, ids in zip(few, encoder.pieces([f" {sentence}" for sentence in few]), strict=True):
            if block.tokens + len(ids) > BLOCK and block.ids:
                yield block
                block = Block([], [])
            block.sentences.append(sentence)
            block.ids.append(ids[:BLOCK])
    if block.ids:
        yield block


@torch.inference_mode()
def _amounts(model: AtlasForCausalLM, blocks: Sequence[Block], pad: int) -> Iterator[list[float]]:
    """Of each block, what is written in each of its sentences."""
    longest = max(block.tokens for block in blocks)
    rows = [list(itertools.chain(*block.ids)) for block in blocks]
    tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])  # (B, T)
    mask = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
    with watched(model) as monitors:
        model.model(input_ids=tokens.to(model.device), attention_mask=mask.to(model.device), use_cache=False)
    writes = _total([monitor.writes for monitor in monitors]).cpu().numpy()  # (B, T)
    for block, row in zip(blocks, writes, strict=True):
        begins = np.cumsum([0, *map(len, block.ids[:-1])])
        yield np.add.reduceat(row[: block.tokens], begins).tolist()


def _total(writes: Sequence[Tensor]) -> Tensor:
    """Over layers and heads: (B, T)."""
    if not writes:
        raise ValueError("model has no memory that could write.")
    return torch.stack([write.sum(-1).double() for write in writes]).sum(0)
