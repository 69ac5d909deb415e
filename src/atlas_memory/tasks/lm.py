"""Language modelling: perplexity by position in the document. Shapes: R rows, T tokens."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from atlas_memory.data import IGNORED, Batch, DataConfig, RowsConfig, SourceConfig, make_loader
from atlas_memory.models import AtlasCache, AtlasForCausalLM
from atlas_memory.models.saved import load_saved


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Tokens predicted at positions begin ≤ p < end of their documents, p tokens having been read before."""

    begin: int
    end: int
    tokens: int
    loss: float  # mean, in nats

    @property
    def name(self) -> str:
        return f"{self.begin:,} – {self.end - 1:,}"

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "perplexity": self.perplexity}


def total(buckets: Sequence[Bucket]) -> Bucket:
    """All of them as one."""
    tokens = sum(bucket.tokens for bucket in buckets)
    loss = sum(bucket.loss * bucket.tokens for bucket in buckets) / max(1, tokens)
    return Bucket(0, max((bucket.end for bucket in buckets), default=0), tokens, loss)


def evaluate(
    folder: str | Path,
    source: SourceConfig,
    *,
    validation: float = 0.0,
    tokens: int | None = None,
    rows: int = 4,
    segment: int = 512,
    first: int = 128,
) -> list[Bucket]:
    """A saved model on documents of a source: those held out, where a share is given; else all."""
    model = load_saved(folder)
    layout = RowsConfig(kind="segments", batch=rows, length=segment, shuffle=False, epochs=1)
    data = DataConfig(source=source, tokenizer=str(folder), rows=layout, validation=validation)
    loader = make_loader(data, "validation" if validation else "all")
    return by_position(model, loader, tokens=tokens, first=first)


@torch.inference_mode()
def by_position(
    model: AtlasForCausalLM, batches: Iterator[Batch], *, tokens: int | None = None, first: int = 128
) -> list[Bucket]:
    """Documents in segments, each row carried from batch to batch; buckets [0, first), [first, 2·first), …"""
    sums: dict[int, float] = defaultdict(float)
    counts: dict[int, int] = defaultdict(int)
    cache, position = AtlasCache(len(model.model.layers)), torch.zeros((), dtype=torch.long)
    for batch in batches:
        cache = model.model.restarted(cache, batch.fresh.tolist())
        position = torch.where(batch.fresh, 0, position)
        here = batch.to(model.device)
        mask = None if bool(batch.mask.all()) else here.mask
        logits = model(input_ids=here.input_ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        losses = F.cross_entropy(logits.float().mT, here.targets, ignore_index=IGNORED, reduction="none").cpu()
        # A token at place p is predicted from the p + 1 before it; the first of a document is never asked for.
        places = position[:, None] + 1 + torch.arange(losses.shape[1])
        asked = batch.targets != IGNORED
        buckets = (places[asked] / first).clamp_min(0.5).log2().floor().long() + 1
        for bucket in buckets.unique().tolist():
            chosen = losses[asked][buckets == bucket]
            sums[bucket] += float(chosen.double().sum())
            counts[bucket] += len(chosen)
        position = position + batch.lengths
        if tokens is not None and sum(counts.values()) >= tokens:
            break
    return [
        Bucket(
            0 if number == 0 else first * 2 ** (number - 1),
            first * 2**number,
            counts[number],
            sums[number] / counts[number],
        )
        for number in sorted(counts)
    ]
