"""MAD (Poli et al.): six small tasks that each ask for one skill of a sequence model, as token ids.

| task | what is read | what is asked |
|---|---|---|
| in_context_recall | keys, each followed by its value | the value, wherever a key comes again |
| fuzzy_recall | the same, keys and values being motifs: up to three tokens, all different | the value's tokens |
| noisy_recall | the same with pairs of noise in between | the value |
| selective_copying | tokens to copy between blanks, a mark, blanks | at the last blanks, the tokens in order |
| compression | random tokens, then a mark | all of them, from what the model made of the mark alone |
| memorization | keys, each followed by a blank | the value, of a dictionary that is the same for all sequences |

>>> example = generate("in_context_recall", Setting(vocabulary=8, length=12), examples=1, seed=0)
>>> print(example.inputs[0].tolist())
[3, 5, 1, 4, 3, 5, 2, 5, 1, 4, 3, 5]
>>> print(example.targets[0].tolist())
[-100, -100, -100, -100, 5, -100, -100, -100, 4, -100, 5, -100]

Keys are the first half of the tokens, values the second; marks are the last ones. In fuzzy recall a test's keys all
have the full length, and a row begins with padding, here 8:

>>> example = generate("fuzzy_recall", Setting(vocabulary=9, length=22, motif=2, marks=1), examples=1, seed=0)
>>> print(example.inputs[0].tolist())
[8, 8, 8, 2, 3, 6, 5, 3, 0, 5, 6, 0, 3, 6, 4, 1, 0, 4, 5, 1, 0, 4]
>>> print(example.targets[0].tolist())
[-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, -100,
-100, -100, -100, -100, -100, -100, -100, -100, -100, 4, 5]

The last pair of a recall task always asks for a key that was shown. Its training examples have every next token as
a target, its tests the answers alone; the other tasks ask for the answers in both. This is as in the public code
(athms/mad-lab, with `multi_query`); what is not:

- In-context and noisy recall keep the last value among the inputs; after it nothing is asked.
- The pair that fuzzy recall ends with has always been shown; in the public code a few in a hundred have not.
- The dictionary of memorization is the seed's, and all numbers are drawn by another generator.
- The `Decoder` of compression, trained with a model and saved beside it, has learned positions and one wide layer.
- An accuracy is the mean over examples, not over classes, at one setting and learning rate: it is no MAD score, which
  is the best of a sweep, averaged over harder settings.

Shapes: N examples, T tokens, V vocabulary, P pairs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atlas_memory.checks import check_choice, check_seed, check_whole
from atlas_memory.data.batch import IGNORED
from atlas_memory.tasks.samples import Cell, Examples


@dataclasses.dataclass(frozen=True)
class Setting:
    """One task's sizes, at the public baseline unless said otherwise."""

    vocabulary: int = 16  # tokens in all
    length: int = 128
    train: int = 12_800  # examples
    test: int = 1_280
    motif: int = 1  # fuzzy recall: most tokens of a key or value
    noise: float = 0.0  # noisy recall: share of pairs
    noise_vocabulary: int = 0
    copied: int = 0  # selective copying: tokens to copy
    marks: int = 0  # blanks, padding and the like

    @property
    def plain(self) -> int:
        """How many of the tokens are neither noise nor marks: the first ones."""
        return self.vocabulary - self.noise_vocabulary - self.marks


PUBLIC = {
    "in_context_recall": Setting(),
    "fuzzy_recall": Setting(motif=3, marks=1),
    "noisy_recall": Setting(vocabulary=32, noise=0.2, noise_vocabulary=16),
    "selective_copying": Setting(length=256, copied=16, marks=2),
    "compression": Setting(length=32, marks=1),
    "memorization": Setting(vocabulary=256, length=32, train=256, marks=1),
}

# For minutes of a CPU: a tenth of the examples, and half of the longest sequences.
SCALES = {
    "public": PUBLIC,
    "small": {
        name: dataclasses.replace(
            setting, train=max(setting.train // 10, 256), test=128, length=min(setting.length, 128)
        )
        for name, setting in PUBLIC.items()
    },
}
TASKS = tuple(PUBLIC)
SCORED = tuple(name for name in TASKS if name != "compression")  # by a model's own next tokens
SPLITS = ("train", "test")
DECODER = "compression_decoder.safetensors"

_Arrays = tuple[np.ndarray, np.ndarray]
_Motif = tuple[int, ...]


class _Order(NamedTuple):
    """What is to be made, and by which numbers."""

    examples: int
    seed: int
    split: str
    random: np.random.RandomState


def generate(task: str, setting: Setting, examples: int, seed: int, split: str = "test") -> Examples:
    """(N, T) inputs and targets; the same for the same seed and split."""
    check_choice("task", task, TASKS)
    check_choice("split", split, SPLITS)
    check_whole("examples", examples)
    random = np.random.RandomState([seed, TASKS.index(task), SPLITS.index(split)])
    inputs, targets = _GENERATORS[task](_Order(examples, seed, split, random), setting)
    return Examples(torch.from_numpy(inputs), torch.from_numpy(targets))


def _recall(order: _Order, setting: Setting) -> _Arrays:
    """Pairs of a dictionary of the sequence's own; a share `noise` of them are two tokens of noise instead."""
    if setting.length < 4 or setting.length % 2:
        raise ValueError(f"length={setting.length} must be an even number of at least 4: two pairs.")
    random, n, half, pairs = order.random, order.examples, setting.plain // 2, setting.length // 2
    keys = random.randint(half, size=(n, pairs))  # (N, P)
    noisy = random.random_sample((n, pairs)) < setting.noise
    noisy[np.arange(n), random.randint(pairs - 1, size=n)] = False  # there is something to ask for,
    noisy[:, -1] = False  # and it is asked for: the last key is one of those before, each as likely
    shown = ((keys[..., None] == np.arange(half)) & ~noisy[..., None])[:, :-1].any(1)  # (N, keys)
    keys[:, -1] = (random.random_sample(shown.shape) * shown).argmax(1)
    dictionary = random.randint(half, setting.plain, size=(n, half))
    tokens = np.stack([keys, np.take_along_axis(dictionary, keys, axis=1)], axis=2)  # (N, P, 2)
    noise = random.randint(setting.noise_vocabulary or 1, size=tokens.shape) + setting.plain
    tokens = np.where(noisy[..., None], noise, tokens).reshape(n, -1)
    asked = np.zeros_like(tokens, dtype=bool)
    asked[:, 1::2] = _seen_before(keys, ~noisy)
    return tokens, _next_tokens(tokens, asked, order.split)


def _seen_before(drawn: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """(N, P) whether the same number stands further left in its row; places that are not counted are not there."""
    one_hot = np.eye(drawn.max() + 1, dtype=np.int64)[drawn] * counted[..., None]  # (N, P, kinds)
    count = np.take_along_axis(one_hot.cumsum(1), drawn[..., None], axis=2)[..., 0]
    return (count > 1) & counted


def _next_tokens(tokens: np.ndarray, asked: np.ndarray, split: str) -> np.ndarray:
    """(N, T) the token after each place: all of them to train on, of a test those asked for."""
    targets = np.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:] if split == "train" else np.where(asked, tokens, IGNORED)[:, 1:]
    return targets


class _Motifs:
    """Different tokens in a row: a length is drawn, then one of all motifs of that length."""

    def __init__(self, tokens: range, lengths: range, draw: Random) -> None:
        self._of_length = [list(itertools.permutations(tokens, length)) for length in lengths]
        self._draw = draw

    def drawn(self) -> _Motif:
        return self._draw.choice(self._draw.choice(self._of_length))


def _fuzzy_recall(order: _Order, setting: Setting) -> _Arrays:
    """Keys and values are motifs of up to `motif` tokens, keys of a test of just so many."""
    half, motif = setting.plain // 2, setting.motif
    if setting.length < 6 * motif:
        raise ValueError(f"length={setting.length} must be at least {6 * motif} with motif={motif}: three pairs.")
    draw = Random(int(order.random.randint(2**31)))
    keys = _Motifs(range(half), range(1 if order.split == "train" else motif, motif + 1), draw)
    values = _Motifs(range(half, setting.plain), range(1, motif + 1), draw)
    rows = [_fuzzy_row(setting, keys, values, draw) for _ in range(order.examples)]
    tokens, asked = (np.array(parts) for parts in zip(*rows, strict=True))  # (N, T + 1)
    return tokens[:, :-1], _next_tokens(tokens, asked, order.split)[:, :-1]


def _fuzzy_row(setting: Setting, keys: _Motifs, values: _Motifs, draw: Random) -> tuple[list[int], list[bool]]:
    """One more token than is read, and which of them are asked for. The pair at the end is shown at a random place."""
    last, value = keys.drawn(), values.drawn()
    dictionary, shown = {last: value}, set[_Motif]()
    tokens, asked = list[int](), list[bool]()

    def tell(key: _Motif) -> None:
        value = dictionary.setdefault(key, values.drawn())
        tokens.extend(key + value)
        asked.extend([False] * len(key) + [key in shown] * len(value))
        shown.add(key)

    longest = 2 * setting.motif  # of pairs
    end = setting.length - len(last) - len(value) - longest  # a pair that begins before it leaves room for the last
    place = draw.randrange(end - longest + 1)  # and one begins there, or soon after
    while len(tokens) < end:
        tell(last if len(tokens) >= place and last not in shown else keys.drawn())
    tell(last)
    padding = setting.length + 1 - len(tokens)
    return [setting.vocabulary - 1] * padding + tokens, [False] * padding + asked


def _selective_copying(order: _Order, setting: Setting) -> _Arrays:
    """Blanks go before any of the tokens; after the mark each further blank asks for the next of them."""
    blank, mark, copied = setting.plain, setting.plain + 1, setting.copied
    tokens = order.random.randint(setting.plain, size=(order.examples, copied))
    blanks = setting.length - 2 * copied - 1
    if blanks < 0:
        raise ValueError(f"length={setting.length} must be at least {2 * copied + 1} with copied={copied}.")
    before = order.random.randint(copied, size=(order.examples, blanks))  # which token
    shift = (before[:, None, :] <= np.arange(copied)[None, :, None]).sum(2)  # (N, copied)
    inputs = np.full((order.examples, setting.length), blank)
    np.put_along_axis(inputs, shift + np.arange(copied), tokens, axis=1)
    inputs[:, blanks + copied] = mark
    targets = np.full_like(inputs, IGNORED)
    targets[:, -copied:] = tokens
    return inputs, targets


def _compression(order: _Order, setting: Setting) -> _Arrays:
    """Random tokens and a mark at the end; targets[:, i] is what a decoder has to say for place i, the mark too."""
    inputs = order.random.randint(setting.plain, size=(order.examples, setting.length))
    inputs[:, -1] = setting.plain
    return inputs, inputs.copy()


def _memorization(order: _Order, setting: Setting) -> _Arrays:
    """A dictionary of the seed's own, in training and test the same: what is asked is in the weights, or nowhere."""
    if setting.length < 2 or setting.length % 2:
        raise ValueError(f"length={setting.length} must be an even number of at least 2: a key and a blank.")
    half = setting.plain // 2
    fixed = np.random.RandomState([order.seed, TASKS.index("memorization")])
    dictionary = fixed.permutation(np.arange(half, setting.plain))[:half]  # each value has one key at most
    keys = order.random.randint(half, size=(order.examples, setting.length // 2))
    inputs = np.stack([keys, np.full_like(keys, setting.plain)], axis=2).reshape(order.examples, -1)
    targets = np.full_like(inputs, IGNORED)
    targets[:, 1::2] = dictionary[keys]  # asked at the blank
    return inputs, targets


_GENERATORS: dict[str, Callable[[_Order, Setting], _Arrays]] = {
    "in_context_recall": _recall,
    "fuzzy_recall": _fuzzy_recall,
    "noisy_recall": _recall,
    "selective_copying": _selective_copying,
    "compression": _compression,
    "memorization": _memorization,
}


class Decoder(nn.Module):
    """One hidden state (B, width) → logits (B, T, V): an MLP over the state and a learned position."""

    def __init__(self, width: int, setting: Setting = PUBLIC["compression"]) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(setting.length, width))
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, setting.vocabulary))

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.layers(hidden[:, None] + self.positions)
        return logits

    def save(self, folder: Path) -> None:
        save_file(self.state_dict(), folder / DECODER)

    @classmethod
    def load(cls, folder: Path) -> Decoder:
        """With the sizes it was saved with."""
        weights = load_file(folder / DECODER)
        length, width = weights["positions"].shape
        decoder = cls(width, Setting(vocabulary=len(weights["layers.2.bias"]), length=length))
        decoder.load_state_dict(weights)
        return decoder


def hidden_of_mark(model: Any, inputs: Tensor) -> Tensor:
    """(B, width) what a model made of the last token."""
    hidden: Tensor = model(input_ids=inputs, use_cache=False, output_hidden_states=True).hidden_states[-1][:, -1]
    return hidden


def decoded(model: Any, inputs: Tensor) -> Tensor:
    """(B, T) what the decoder beside a saved model says."""
    hidden = hidden_of_mark(model, inputs)
    return decoder_of(model, inputs.shape[1]).to(hidden).forward(hidden).argmax(-1)


def decoder_of(model: Any, length: int) -> Decoder:
    """The one beside a saved model, for so many tokens."""
    folder = Path(model.name_or_path)
    if not (folder / DECODER).is_file():
        raise ValueError(f"model={model.name_or_path!r} has no {DECODER}; train a mad.Decoder with it, and save that.")
    decoder = Decoder.load(folder)
    if len(decoder.positions) != length:
        raise ValueError(
            f"model={model.name_or_path!r}: its {DECODER} is for {len(decoder.positions)} tokens, but these examples "
            f"have {length}; choose the scale it was trained with."
        )
    return decoder


def training(task: str, scale: str = "small", seed: int = 0) -> Examples:
    """The training examples of a task at a scale."""
    check_choice("task", task, TASKS)
    check_choice("scale", scale, tuple(SCALES))
    setting = SCALES[scale][task]
    return generate(task, setting, setting.train, seed, "train")


def cells(
    samples: int | None = None,
    seed: int = 0,
    tasks: Sequence[str] = SCORED,
    scale: str = "small",
    lengths: Sequence[int] | None = None,
) -> list[Cell]:
    """The test examples of these tasks, at these lengths or that of the scale; compression needs the model's decoder.

    Only recall and copying can be asked at other lengths than those learned.
    """
    check_choice("scale", scale, tuple(SCALES))
    check_whole("samples", samples, optional=True)
    check_seed(seed)
    made = []
    for task in tasks:
        check_choice("task", task, TASKS)
        for length in lengths or [SCALES[scale][task].length]:
            setting = dataclasses.replace(SCALES[scale][task], length=length)
            generate(task, setting, 1, seed)  # lengths that do not do for the task are told of now
            count = samples or setting.test
            examples = functools.cache(functools.partial(generate, task, setting, count, seed))
            cell = Cell(task, length, count, examples=examples, vocabulary=setting.vocabulary)
            if task == "compression":
                check = functools.partial(decoder_of, length=length)
                cell = dataclasses.replace(cell, said=decoded, check=check)
            made.append(cell)
    return made
