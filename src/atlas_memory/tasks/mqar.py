"""Multi-query associative recall (Arora et al.): pairs of keys and values, then the keys again; say each one's value.

    k₁ v₁ k₂ v₂ … kₙ vₙ  · · kₐ · · · k_b · …        targets: at kₐ its value, at k_b its value, …

Keys are drawn from the first half of the vocabulary, values from the second, without repetition within a sequence. The
gaps between queries follow a power law: most keys come back soon, a few late. Places between them hold random tokens
that are no keys of the sequence. (In the public task they may be, which happens to 2 queries in 1,000; among the few
tokens of the small scale it would be one in six, and would say that a key has another value.)

>>> example = generate(Setting(length=16, pairs=2, examples=1), vocabulary=32, seed=0)
>>> print(example.inputs[0].tolist())
[8, 30, 9, 21, 9, 2, 22, 28, 22, 11, 3, 11, 8, 1, 23, 27]
>>> print(example.targets[0].tolist())
[-100, -100, -100, -100, 21, -100, -100, -100, -100, -100, -100, -100, 30, -100, -100, -100]

Shapes: N examples, T tokens, P pairs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch

from atlas_memory.checks import check_choice, check_seed, check_whole
from atlas_memory.data.batch import IGNORED
from atlas_memory.tasks.samples import Cell, Examples

_ROWS = 1024  # at once: a public training set would take gigabytes
POWER = 0.01  # of the law of gaps: density ∝ gap^(POWER − 1)


@dataclasses.dataclass(frozen=True)
class Setting:
    length: int
    pairs: int
    examples: int

    def __post_init__(self) -> None:
        for name in ("length", "pairs", "examples"):
            check_whole(name, getattr(self, name))
        # Pairs take 2P places, and every query two of the rest.
        if self.length % 2 or 4 * self.pairs > self.length:
            raise ValueError(f"length={self.length}, pairs={self.pairs}: even, and at least four times the pairs.")


@dataclasses.dataclass(frozen=True)
class Scale:
    vocabulary: int
    train: tuple[Setting, ...]
    test: tuple[Setting, ...]


def _settings(examples: int, *sizes: tuple[int, int]) -> tuple[Setting, ...]:
    return tuple(Setting(length, pairs, examples) for length, pairs in sizes)


_TEST = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 64), (512, 128), (1024, 256))
SCALES = {
    "public": Scale(
        vocabulary=8192,
        train=(Setting(64, 4, 100_000), *_settings(20_000, (128, 8), (256, 16), (256, 32), (256, 64))),
        test=_settings(1000, *_TEST),
    ),
    # The same task for minutes of a CPU: hardly more tokens than its longest sequences need, since with 256 the
    # recurrent models did not find in 800 steps that there is something to recall (docs/results.md); shorter sequences.
    "small": Scale(
        vocabulary=72,
        train=(Setting(64, 4, 10_000), *_settings(2_000, (64, 8), (128, 16))),
        test=_settings(200, (64, 4), (64, 8), (64, 16), (128, 32)),
    ),
}


def generate(setting: Setting, vocabulary: int, seed: int, split: str = "test") -> Examples:
    """(N, T) inputs and targets of one setting; the same for the same seed and split."""
    check_whole("vocabulary", vocabulary, least=2 * setting.pairs + 2)
    check_choice("split", split, ("train", "test"))
    n, t, p = setting.examples, setting.length, setting.pairs
    random = np.random.RandomState([seed, t, p, ("train", "test").index(split)])
    half = vocabulary // 2
    keys = _without_repetition(random, n, np.zeros(half - 1), p) + 1  # 0 is nobody's
    values = _without_repetition(random, n, np.zeros(vocabulary - half), p) + half
    inputs = _between(random, keys, t, vocabulary)
    inputs[:, 0 : 2 * p : 2], inputs[:, 1 : 2 * p : 2] = keys, values
    slots = (t - 2 * p) // 2
    gaps = _without_repetition(random, n, (POWER - 1) * np.log(np.arange(1, slots + 1)), p)
    places = 2 * p + 2 * gaps  # (N, P)
    targets = np.full((n, t), IGNORED)
    np.put_along_axis(inputs, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    return Examples(torch.from_numpy(inputs), torch.from_numpy(targets))


def _between(random: np.random.RandomState, keys: np.ndarray, length: int, vocabulary: int) -> np.ndarray:
    """(N, T) random tokens, none of them a key of its row (N, P)."""
    tokens = random.randint(vocabulary - keys.shape[1], size=(len(keys), length))
    for key in np.sort(keys, axis=1).T[..., None]:  # those from a key on give way to it, the smallest first
        tokens += tokens >= key
    return tokens


def _without_repetition(random: np.random.RandomState, rows: int, log_weights: np.ndarray, count: int) -> np.ndarray:
    """(rows, count) different places each, drawn one after another by weight: the largest after Gumbel noise."""
    drawn = [np.empty((0, count), np.int64)]
    for begin in range(0, rows, _ROWS):
        perturbed = random.gumbel(size=(min(_ROWS, rows - begin), len(log_weights))) + log_weights
        largest = np.argpartition(-perturbed, count - 1, axis=1)[:, :count]
        order = np.argsort(-np.take_along_axis(perturbed, largest, axis=1), axis=1)
        drawn.append(np.take_along_axis(largest, order, axis=1))
    return np.concatenate(drawn)


def training(scale: str = "small", seed: int = 0) -> list[Examples]:
    """The training examples of a scale, one group for each setting."""
    check_choice("scale", scale, tuple(SCALES))
    chosen = SCALES[scale]
    return [generate(setting, chosen.vocabulary, seed, "train") for setting in chosen.train]


def cells(
    lengths: Sequence[int] | None = None, samples: int | None = None, seed: int = 0, scale: str = "small"
) -> list[Cell]:
    """The test settings of a scale; of these lengths, and with as many samples, where they are given."""
    check_choice("scale", scale, tuple(SCALES))
    check_whole("samples", samples, optional=True)
    check_seed(seed)
    chosen = SCALES[scale]
    known = tuple(dict.fromkeys(setting.length for setting in chosen.test))
    for length in lengths or ():
        if length not in known:
            raise ValueError(f"lengths: {length} is not in scale={scale!r}; accepted: {', '.join(map(str, known))}.")
    made = []
    for setting in chosen.test:
        if lengths is None or setting.length in lengths:
            setting = dataclasses.replace(setting, examples=samples or setting.examples)
            examples = functools.cache(functools.partial(generate, setting, chosen.vocabulary, seed))
            details = {"pairs": setting.pairs}
            made.append(
                Cell(
                    "mqar",
                    setting.length,
                    setting.examples,
                    examples=examples,
                    details=details,
                    vocabulary=chosen.vocabulary,
                )
            )
    return made
