"""Learning rate and penalties of a step, by its number alone: a resumed run cannot be at another place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from atlas_memory.train.recipe import LoopConfig, ScheduleConfig


def factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """What the learning rate is multiplied by in this step, from 0, of so many."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    place = (step - config.warmup) / max(1, steps - 1 - config.warmup)  # 0 after the warm-up, 1 in the last step
    return _SHAPES[config.name](config, min(place, 1.0), steps)


def _cosine(config: ScheduleConfig, place: float, steps: int) -> float:
    return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * place))


def _wsd(config: ScheduleConfig, place: float, steps: int) -> float:
    share = config.decay * steps / max(1, steps - config.warmup)  # of the steps after the warm-up
    fallen = 0.0 if share == 0 else max(0.0, (place - 1) / min(share, 1.0) + 1)
    return 1 - (1 - config.final) * fallen


def _constant(config: ScheduleConfig, place: float, steps: int) -> float:
    return 1.0


_SHAPES: dict[str, Callable[[ScheduleConfig, float, int], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "constant": _constant,
}


class Penalties(NamedTuple):
    """On the mean write of the memories: at all tokens, and at those of a background."""

    write: float = 0.0
    leak: float = 0.0


NO_PENALTIES = Penalties()


def penalties(config: LoopConfig, step: int) -> Penalties:
    """In this step, from 0: nothing before they begin, then a straight line up to their full size."""
    begun = step - config.write_penalty_from
    if begun < 0:
        return NO_PENALTIES
    share = min(1.0, (begun + 1) / max(1, config.write_penalty_ramp))
    return Penalties(share * config.write_penalty, share * config.leak_penalty)


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
