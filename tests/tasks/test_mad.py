"""MAD: the public settings, and for every task that its targets follow from its inputs."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from atlas_memory.data import IGNORED
from atlas_memory.models import AtlasForCausalLM
from atlas_memory.tasks.evaluation import Request, evaluate
from atlas_memory.tasks.mad import (
    PUBLIC,
    SCALES,
    SCORED,
    TASKS,
    Decoder,
    Setting,
    cells,
    decoded,
    generate,
    hidden_of_mark,
    training,
)
from tests.tasks.conftest import save_small


def rows(task: str, split: str = "test", examples: int = 40) -> list[tuple[list[int], list[int]]]:
    inputs, targets = generate(task, PUBLIC[task], examples, seed=0, split=split)
    assert inputs.shape == targets.shape == (examples, PUBLIC[task].length)
    assert int(inputs.min()) >= 0 and int(max(inputs.max(), targets.max())) < PUBLIC[task].vocabulary
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


def test_public_settings() -> None:
    assert len(TASKS) == len(PUBLIC) == 6
    sizes = {task: (setting.vocabulary, setting.length, setting.train) for task, setting in PUBLIC.items()}
    assert sizes == {
        "in_context_recall": (16, 128, 12_800),
        "fuzzy_recall": (16, 128, 12_800),
        "noisy_recall": (32, 128, 12_800),
        "selective_copying": (16, 256, 12_800),
        "compression": (16, 32, 12_800),
        "memorization": (256, 32, 256),
    }
    plain = {task: setting.plain for task, setting in PUBLIC.items()}
    assert plain == {
        "in_context_recall": 16,
        "fuzzy_recall": 15,
        "noisy_recall": 16,
        "selective_copying": 14,
        "compression": 15,
        "memorization": 255,
    }
    assert PUBLIC["fuzzy_recall"].motif == 3 and PUBLIC["noisy_recall"].noise == 0.2
    assert PUBLIC["selective_copying"].copied == 16


@pytest.mark.parametrize("task", ["in_context_recall", "noisy_recall"])
def test_recall(task: str) -> None:
    """A target is the value its key had before; every key that comes again has one, and the last key does."""
    noisy = 0
    for inputs, targets in rows(task):
        known: dict[int, int] = {}
        for place in range(0, len(inputs), 2):  # noise takes the place of pairs
            key, value = inputs[place : place + 2]
            if key >= 16:
                noisy += 2
                assert value >= 16 and targets[place : place + 2] == [IGNORED] * 2
                continue
            assert key < 8 <= value < 16
            assert targets[place : place + 2] == [known.get(key, IGNORED), IGNORED]
            known[key] = value
        assert targets[-2] == inputs[-1]
    assert noisy / (40 * 128) == pytest.approx(PUBLIC[task].noise, abs=0.02)


@pytest.mark.parametrize("task", ["in_context_recall", "noisy_recall", "fuzzy_recall"])
def test_recall_is_trained_on_every_next_token(task: str) -> None:
    for inputs, targets in rows(task, "train"):
        assert targets[:-1] == inputs[1:]
        # Of fuzzy recall alone a token more than is read is made: the end of the last value.
        assert (targets[-1] == IGNORED) == (task != "fuzzy_recall")


def fuzzy_pairs(inputs: list[int], last: int) -> tuple[int, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """The padding before, and the pairs: keys are of the first seven tokens, values of the eight after them."""
    tokens = [*inputs, last]
    padding = tokens.count(15)
    assert tokens[:padding] == [15] * padding
    motifs = [tuple(run) for _, run in itertools.groupby(tokens[padding:], key=lambda token: token >= 7)]
    return padding, list(zip(motifs[::2], motifs[1::2], strict=True))


def test_fuzzy_recall() -> None:
    """What is asked is the value of a key that stood further left, all of it; of a new key nothing is asked."""
    keys, values = set(), set()
    for inputs, targets in rows("fuzzy_recall", examples=200):
        place, pairs = fuzzy_pairs(inputs, targets[-1])
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        expected = [IGNORED] * place
        for key, value in pairs:
            assert value == known.get(key, value)
            expected += [IGNORED] * len(key) + ([*value] if key in known else [IGNORED] * len(value))
            seen = key in known
            known[key] = value
        assert seen and targets == expected[1:]  # the last one is asked for; the token before each asks
        assert place <= 2 * 3 + 1
        keys |= set(known)
        values |= set(known.values())
    assert keys == set(itertools.permutations(range(7), 3))
    assert {len(value) for value in values} == {1, 2, 3} and all(len(set(value)) == len(value) for value in values)


def test_fuzzy_recall_is_trained_with_keys_of_all_lengths() -> None:
    lengths = Counter(
        len(key)
        for inputs, targets in rows("fuzzy_recall", "train", 200)
        for key, _ in fuzzy_pairs(inputs, targets[-1])[1]
    )
    assert all(lengths[length] / lengths.total() == pytest.approx(1 / 3, abs=0.03) for length in (1, 2, 3))


def test_selective_copying() -> None:
    for inputs, targets in rows("selective_copying"):
        tokens = [token for token in inputs if token < 14]
        assert len(tokens) == 16 and targets[-16:] == tokens and inputs[-17:] == [15] + [14] * 16
        assert set(targets[:-16]) == {IGNORED} and inputs.count(15) == 1


def test_compression() -> None:
    for inputs, targets in rows("compression"):
        assert inputs[-1] == 15 > max(inputs[:-1]) and inputs == targets


def test_compression_is_scored_by_the_decoder_beside_the_model(tmp_path: Path) -> None:
    model = save_small(tmp_path / "model", 32)
    request = Request("mad", model, cells(20, tasks=["compression"]), tmp_path / "out.json", {})
    with pytest.raises(ValueError, match=r"has no compression_decoder\.safetensors; train a mad\.Decoder"):
        evaluate(request, progress=False)
    decoder = Decoder(16)
    with torch.no_grad():  # says 3 everywhere
        decoder.layers[2].weight.zero_()
        decoder.layers[2].bias.copy_(torch.eye(16)[3])
    decoder.save(model)
    (result,) = evaluate(request, progress=False).results
    targets = generate("compression", SCALES["small"]["compression"], 20, seed=0).targets
    assert result.accuracy == pytest.approx(float((targets == 3).float().mean()))


def test_a_decoder_keeps_its_sizes(tmp_path: Path) -> None:
    model = AtlasForCausalLM.from_pretrained(save_small(tmp_path, 32))
    setting = Setting(vocabulary=6, length=9, marks=1)
    decoder = Decoder(16, setting)
    decoder.save(tmp_path)
    inputs = generate("compression", setting, 4, seed=0).inputs
    with torch.no_grad():
        expected = decoder(hidden_of_mark(model, inputs)).argmax(-1)
    assert torch.equal(decoded(model, inputs), expected)
    with pytest.raises(ValueError, match=r"is for 9 tokens, but these examples have 8; choose the scale"):
        decoded(model, inputs[:, 1:])


def test_memorization_has_one_dictionary() -> None:
    dictionary: dict[int, int] = {}
    for inputs, targets in rows("memorization") + rows("memorization", "train", 256):
        for place in range(0, 32, 2):
            assert inputs[place + 1] == 255 and targets[place] == IGNORED
            assert dictionary.setdefault(inputs[place], targets[place + 1]) == targets[place + 1]
    assert sorted(dictionary) == list(range(127))
    assert len(set(dictionary.values())) == 127 and set(dictionary.values()) < set(range(127, 255))


@pytest.mark.parametrize("task", TASKS)
def test_seeds_and_splits(task: str) -> None:
    setting = SCALES["small"][task]
    one = generate(task, setting, 5, 0).inputs
    assert torch.equal(one, generate(task, setting, 5, 0).inputs)
    assert not torch.equal(one, generate(task, setting, 5, 1).inputs)
    assert not torch.equal(one, generate(task, setting, 5, 0, "train").inputs)
    assert training(task).inputs.shape == (setting.train, setting.length)


def test_cells_of_other_lengths() -> None:
    made = cells(samples=2, tasks=["noisy_recall", "selective_copying"], lengths=[64, 256])
    assert [(cell.task, cell.length) for cell in made] == [
        (task, length) for task in ("noisy_recall", "selective_copying") for length in (64, 256)
    ]
    for cell in made:
        assert cell.examples is not None and cell.examples().inputs.shape == (2, cell.length)
    with pytest.raises(ValueError, match="length=32 must be at least 33 with copied=16"):
        cells(tasks=["selective_copying"], lengths=[32])
    with pytest.raises(ValueError, match="length=7 must be an even number of at least 2"):
        cells(tasks=["memorization"], lengths=[7])


def test_cells_and_errors() -> None:
    assert [cell.task for cell in cells()] == list(SCORED)
    assert [cell.vocabulary for cell in cells(tasks=TASKS)] == [16, 16, 32, 16, 16, 256]
    with pytest.raises(ValueError, match="task='sorting' is not a choice; allowed: in_context_recall"):
        cells(tasks=["sorting"])
    with pytest.raises(ValueError, match="examples=0 must be a whole number"):
        generate("memorization", Setting(), 0, 0)
    with pytest.raises(ValueError, match="length=3 must be an even number of at least 4"):
        generate("in_context_recall", Setting(length=3), 1, 0)
    with pytest.raises(ValueError, match="length=17 must be at least 18 with motif=3"):
        generate("fuzzy_recall", Setting(length=17, motif=3, marks=1), 1, 0)
