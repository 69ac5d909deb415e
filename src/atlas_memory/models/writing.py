"""Writing on from a prompt of any length: read in constant memory, then one token at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from atlas_memory.models.modeling_atlas import AtlasForCausalLM


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and how many."""

    tokens: int = 200
    temperature: float = 1.0  # 0: the most probable token
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be more than 0 and at most 1.")

    def warpers(self) -> LogitsProcessorList:
        chosen = LogitsProcessorList()
        if self.temperature not in (0, 1):
            chosen.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            chosen.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            chosen.append(TopPLogitsWarper(self.top_p))
        return chosen


@torch.inference_mode()
def write(
    model: AtlasForCausalLM,
    prompt: Iterable[Sequence[int]],
    sampling: Sampling,
    *,
    end: int | None = None,
    progress: bool = True,
) -> Iterator[int]:
    """Tokens that follow a prompt, given in pieces; `end` is the token after which nothing follows."""
    last: list[int] = []
    cache = model.read(_all_but_the_last(prompt, last), progress=progress)
    if not last:
        raise ValueError("prompt is empty; it must hold at least one token.")
    device = model.lm_head.weight.device
    generator = None if sampling.seed is None else torch.Generator(device).manual_seed(sampling.seed)
    token: Any = torch.tensor([last], device=device)
    warpers = sampling.warpers()
    for _ in range(sampling.tokens):
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].float()
        token = _choose(warpers(token, logits), sampling.temperature, generator)
        if int(token) == end:
            return
        yield int(token)


def _all_but_the_last(pieces: Iterable[Sequence[int]], last: list[int]) -> Iterator[list[int]]:
    """The pieces one token late; the last token is left in `last`."""
    for piece in pieces:
        ids = [*last, *piece]
        if ids:
            last[:] = ids[-1:]
            if ids[:-1]:
                yield ids[:-1]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
