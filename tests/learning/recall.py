"""Noisy associative recall: facts among random tokens, asked long after; later facts overwrite earlier ones.

A fact is a key token followed by a value token. Facts lie at random places of a stretch of noise; every key is given
in each of two rounds, with two values, of which the last counts. After a gap of noise alone, each key is shown once
more, and its value is to be predicted. Chance is one in the number of values. Lessons begin without the gap: what is
hard to find is how a key and its value are bound, and the gap makes looking for it slow. Accuracies are those of the
whole task.

    python -m tests.learning.recall atlas --gap 200 --steps 600 --set momentum_floor=1e-6
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atlas_memory import Memory


@dataclasses.dataclass(frozen=True)
class Task:
    keys: int = 8
    values: int = 8
    noise: int = 16
    facts_stretch: int = 64
    gap: int = 200
    rounds: int = 2  # of facts, each key once per round: a later round overwrites the earlier ones

    @property
    def vocabulary(self) -> int:
        return self.keys + self.values + self.noise

    @property
    def length(self) -> int:
        return self.facts_stretch + self.gap + 2 * self.keys

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens (size, length) and targets (size, length): the value at the place of an asked key, −1 elsewhere."""
        rows = [self._sequence(generator) for _ in range(size)]
        return torch.stack([tokens for tokens, _ in rows]), torch.stack([targets for _, targets in rows])

    def _sequence(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        def draw(count: int, below: int) -> Tensor:
            return torch.randint(below, (count,), generator=generator)

        tokens = self.keys + self.values + draw(self.length, self.noise)
        targets = torch.full((self.length,), -1)
        order = torch.cat([torch.randperm(self.keys, generator=generator) for _ in range(self.rounds)])
        values = draw(len(order), self.values)
        places = torch.randperm(self.facts_stretch // 2, generator=generator)[: len(order)].sort().values * 2
        tokens[places], tokens[places + 1] = order, self.keys + values
        truth = torch.empty(self.keys, dtype=torch.long)
        for key, value in zip(order.tolist(), values.tolist(), strict=True):
            truth[key] = value
        asked = torch.randperm(self.keys, generator=generator)
        start = self.facts_stretch + self.gap + 2 * torch.arange(self.keys)
        tokens[start], targets[start] = asked, self.keys + truth[asked]
        return tokens, targets


class TwoLayers(nn.Module):
    """Embedding, two blocks of memory and feed-forward, and a head: the smallest model that can use a memory."""

    def __init__(self, vocabulary: int, preset: str, width: int = 64, heads: int = 2, **overrides: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixers = nn.ModuleList(Memory(width, heads, preset, **overrides) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(5))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, (mixer, feed) in enumerate(zip(self.mixers, self.feeds, strict=True)):
            x = x + mixer(self.norms[2 * i](x))[0]
            x = x + feed(self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x))


# The gap grows from nothing to its length between these shares of the steps.
GROWING = (0.6, 0.9)


def lesson(task: Task, done: float) -> Task:
    """What is learned when this share of the steps is done."""
    begin, end = GROWING
    return dataclasses.replace(task, gap=round(task.gap * min(max((done - begin) / (end - begin), 0.0), 1.0)))


def train(
    model: nn.Module,
    task: Task,
    steps: int,
    batch: int = 16,
    rate: float = 3e-3,
    seed: int = 0,
    watch: Callable[[int, float], None] | None = None,
    every: int = 50,
) -> float:
    """Train, and return the accuracy on fresh sequences; `watch` is shown it every so many steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = min(20, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1.0) * (1 - 0.9 * step / steps)
    )
    for step in range(1, steps + 1):
        tokens, targets = lesson(task, step / steps).batch(batch, generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if watch is not None and step % every == 0:
            watch(step, accuracy(model, task, torch.Generator().manual_seed(seed + 1)))
    return accuracy(model, task, generator)


@torch.inference_mode()
def accuracy(model: nn.Module, task: Task, generator: torch.Generator, size: int = 64) -> float:
    tokens, targets = task.batch(size, generator)
    asked = targets >= 0
    return (model(tokens).argmax(-1) == targets)[asked].float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a two-layer model on noisy recall, and print its accuracy.")
    parser.add_argument("preset")
    parser.add_argument("--gap", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2, help="1: no fact is overwritten")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of MemorySpec")
    options = parser.parse_args()
    fields = {"key_width": 16, "chunk": 16}
    fields |= {name: json.loads(value) for name, value in (text.split("=", 1) for text in options.set)}
    task, start = Task(gap=options.gap, rounds=options.rounds), time.perf_counter()
    torch.manual_seed(options.seed)
    model = TwoLayers(task.vocabulary, options.preset, **fields)

    def watch(step: int, value: float) -> None:
        print(f"{options.preset} step {step}: {value:.0%} after {time.perf_counter() - start:.0f} s", flush=True)

    train(model, task, options.steps, options.batch, options.rate, options.seed, watch)


if __name__ == "__main__":
    main()
