"""MAD (Poli et al.): six small tasks that each ask for one skill of a sequence model, as token ids.

| task | what is read | what is asked |
|---|---|---|
| in_context_recall | keys, each followed by its value | the value, wherever a key comes again |
| fuzzy_recall | the same, keys and values being words of one to three tokens | the value's tokens |
| noisy_recall | the same with tokens of noise between pairs | the value |
| selective_copying | tokens to copy between blanks, then a mark | the tokens in order |
| compression | random tokens, then a mark | all of them, from what the model made of the mark alone |
| memorization | keys, each followed by a blank | the value, of a dictionary that is the same for all sequences |

>>> example = generate("in_context_recall", Setting(vocabulary=8, length=12), examples=1, seed=0)
>>> print(example.inputs[0].tolist())
[3, 4, 1, 7, 3, 4, 2, 5, 1, 7, 1, 7]
>>> print(example.targets[0].tolist())
[-100, -100, -100, -100, 4, -100, -100, -100, 7, -100, 7, -100]

A vocabulary counts the tokens that mean something; noise, blanks and marks come after it (`Setting.tokens`). For
compression a `Decoder` is trained with the model and saved beside it; the target of place i is token i.

Shapes: N examples, T tokens, V vocabulary, P pairs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atlas_memory.data.batch import IGNORED
from atlas_memory.data.options import check_choice, check_whole
from atlas_memory.tasks.samples import Cell, Examples


@dataclasses.dataclass(frozen=True)
class Setting:
    """One task's sizes, at the public baseline unless said otherwise."""

    vocabulary: int = 16
    length: int = 128
    train: int = 12_800  # examples
    test: int = 1_280
    motif: int = 1  # fuzzy recall: most tokens of a key or value
    noise: float = 0.0  # noisy recall: share of places
    noise_vocabulary: int = 0
    copied: int = 0  # selective copying: tokens to copy
    marks: int = 0  # tokens beyond the vocabulary and the noise

    @property
    def tokens(self) -> int:
        """How many a model has to know."""
        return self.vocabulary + self.noise_vocabulary + self.marks


PUBLIC = {
    "in_context_recall": Setting(),
    "fuzzy_recall": Setting(motif=3),
    "noisy_recall": Setting(noise=0.2, noise_vocabulary=16),
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
DECODER = "compression_decoder.safetensors"

_Arrays = tuple[np.ndarray, np.ndarray]


def generate(task: str, setting: Setting, examples: int, seed: int, split: str = "test") -> Examples:
    """(N, T) inputs and targets; the same for the same seed and split."""
    check_choice("task", task, TASKS)
    check_choice("split", split, ("train", "test"))
    check_whole("examples", examples)
    random = np.random.RandomState([seed, TASKS.index(task), ("train", "test").index(split)])
    inputs, targets = _GENERATORS[task](random, setting, examples, seed)
    return Examples(torch.from_numpy(inputs), torch.from_numpy(targets))


def _recall(random: np.random.RandomState, setting: Setting, n: int, seed: int) -> _Arrays:
    """Pairs of a dictionary of the sequence's own: keys are the first half of the vocabulary, values the second."""
    half, pairs = setting.vocabulary // 2, setting.length // 2
    drawn = random.randint(half, size=(n, pairs))  # (N, P) keys
    dictionary = random.randint(half, size=(n, half)) + half
    values = np.take_along_axis(dictionary, drawn, axis=1)
    inputs = np.stack([drawn, values], axis=2).reshape(n, -1)
    targets = np.full_like(inputs, IGNORED)
    targets[:, ::2] = np.where(_seen_before(drawn, half), values, IGNORED)  # asked at the key
    return inputs, targets


def _seen_before(drawn: np.ndarray, kinds: int) -> np.ndarray:
    """(N, P) whether the same number stands further left in its row."""
    one_hot = np.eye(kinds, dtype=np.int64)[drawn]  # (N, P, kinds)
    count = np.take_along_axis(one_hot.cumsum(1), drawn[..., None], axis=2)[..., 0]
    return count > 1


def _noisy_recall(random: np.random.RandomState, setting: Setting, n: int, seed: int) -> _Arrays:
    """Noise between pairs, never within one: the value still follows its key."""
    noisy = round(setting.noise * setting.length)
    noisy += (setting.length - noisy) % 2
    inner = dataclasses.replace(setting, length=setting.length - noisy, noise=0.0)
    inputs, targets = _recall(random, inner, n, seed)
    pairs = inputs.shape[1] // 2
    # Every place of noise goes before one of the pairs, or after the last.
    before = random.randint(pairs + 1, size=(n, noisy))
    shift = (before[:, None, :] <= np.arange(pairs)[None, :, None]).sum(2)  # (N, P)
    places = np.repeat(shift, 2, axis=1) + np.arange(2 * pairs)
    whole = random.randint(setting.noise_vocabulary, size=(n, setting.length)) + setting.vocabulary
    asked = np.full_like(whole, IGNORED)
    np.put_along_axis(whole, places, inputs, axis=1)
    np.put_along_axis(asked, places, targets, axis=1)
    return whole, asked


def _fuzzy_recall(random: np.random.RandomState, setting: Setting, n: int, seed: int) -> _Arrays:
    """Keys and values are words of 1 to `motif` tokens; of a value asked for, every token is a target."""
    half = setting.vocabulary // 2
    words = half // 2  # entries of the dictionary: fewer than tokens, so that keys come again
    keys, key_lengths = _words(random, n, words, setting.motif, half)  # (N, words, motif), (N, words)
    values, value_lengths = _words(random, n, words, setting.motif, half)
    drawn = random.randint(words, size=(n, setting.length // 2))  # (N, P): enough even if all words have one token
    first = np.take_along_axis(key_lengths + value_lengths, drawn, axis=1).cumsum(1)
    begins = np.concatenate([np.zeros((n, 1), np.int64), first[:, :-1]], axis=1)  # (N, P)
    middles = begins + np.take_along_axis(key_lengths, drawn, axis=1)
    asked = _seen_before(drawn, words)
    inputs = np.zeros((n, setting.length * setting.motif), np.int64)
    targets = np.full_like(inputs, IGNORED)
    for token in range(setting.motif):
        for tokens, lengths, starts, shift in ((keys, key_lengths, begins, 0), (values, value_lengths, middles, half)):
            row, pair = np.nonzero(np.take_along_axis(lengths, drawn, axis=1) > token)
            place, said = starts[row, pair] + token, tokens[row, drawn[row, pair], token] + shift
            inputs[row, place] = said
            if shift:  # the token before asks for it
                targets[row, place - 1] = np.where(asked[row, pair], said, IGNORED)
    return inputs[:, : setting.length], targets[:, : setting.length]


def _words(random: np.random.RandomState, n: int, count: int, longest: int, kinds: int) -> _Arrays:
    """(N, count, longest) tokens and (N, count) lengths: no two words of a row begin alike, so none is doubtful."""
    tokens = random.randint(kinds, size=(n, count, longest))
    tokens[:, :, 0] = random.random_sample((n, kinds)).argsort(1)[:, :count]
    return tokens, random.randint(1, longest + 1, size=(n, count))


def _selective_copying(random: np.random.RandomState, setting: Setting, n: int, seed: int) -> _Arrays:
    """Tokens at random places among blanks; after the mark each place asks for the next of them."""
    blank, mark, copied = setting.vocabulary, setting.vocabulary + 1, setting.copied
    read = setting.length - copied
    tokens = random.randint(setting.vocabulary, size=(n, copied))
    places = np.sort(random.random_sample((n, read)).argsort(1)[:, :copied], axis=1)
    inputs = np.full((n, setting.length), blank)
    inputs[:, read:] = mark
    np.put_along_axis(inputs, places, tokens, axis=1)
    targets = np.full_like(inputs, IGNORED)
    targets[:, read:] = tokens
    return inputs, targets


def _compression(random: np.random.RandomState, setting: Setting, n: int, seed: int) -> _Arrays:
    """Random tokens and a mark at the end; targets[:, i] is what a decoder has to say for place i."""
    targets = random.randint(setting.vocabulary, size=(n, setting.length))
    targets[:, -1] = setting.vocabulary
    return targets.copy(), np.where(targets == setting.vocabulary, IGNORED, targets)


def _memorization(random: np.random.RandomState, setting: Setting, n: int, seed: int) -> _Arrays:
    """A dictionary of the seed's own, in training and test the same: what is asked is in the weights, or nowhere."""
    half, blank = setting.vocabulary // 2, setting.vocabulary
    dictionary = np.random.RandomState([seed, TASKS.index("memorization")]).randint(half, size=half) + half
    keys = random.randint(half, size=(n, setting.length // 2))
    inputs = np.stack([keys, np.full_like(keys, blank)], axis=2).reshape(n, -1)
    targets = np.full_like(inputs, IGNORED)
    targets[:, 1::2] = dictionary[keys]  # asked at the blank
    return inputs, targets


_GENERATORS: dict[str, Callable[[np.random.RandomState, Setting, int, int], _Arrays]] = {
    "in_context_recall": _recall,
    "fuzzy_recall": _fuzzy_recall,
    "noisy_recall": _noisy_recall,
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
    folder = Path(model.name_or_path)
    if not (folder / DECODER).is_file():
        raise ValueError(f"model={model.name_or_path!r} has no {DECODER}; train a mad.Decoder with it, and save that.")
    decoder = Decoder.load(folder)
    if len(decoder.positions) != inputs.shape[1]:
        raise ValueError(
            f"model={model.name_or_path!r}: its {DECODER} is for {len(decoder.positions)} tokens, but these examples "
            f"have {inputs.shape[1]}; choose the scale it was trained with."
        )
    hidden = hidden_of_mark(model, inputs)
    return decoder.to(hidden).forward(hidden).argmax(-1)


def training(task: str, scale: str = "small", seed: int = 0) -> Examples:
    """The training examples of a task at a scale."""
    check_choice("task", task, TASKS)
    check_choice("scale", scale, tuple(SCALES))
    setting = SCALES[scale][task]
    return generate(task, setting, setting.train, seed, "train")


def cells(samples: int | None = None, seed: int = 0, tasks: Sequence[str] = SCORED, scale: str = "small") -> list[Cell]:
    """The test examples of these tasks; compression needs the model's decoder."""
    check_choice("scale", scale, tuple(SCALES))
    check_whole("samples", samples, optional=True)
    made = []
    for task in tasks:
        check_choice("task", task, TASKS)
        setting = SCALES[scale][task]
        count = samples or setting.test
        examples = functools.cache(functools.partial(generate, task, setting, count, seed))
        said = decoded if task == "compression" else None
        made.append(Cell(task, setting.length, count, examples=examples, said=said))
    return made
