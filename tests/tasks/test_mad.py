"""MAD: the public settings, and for every task that its targets follow from its inputs."""

from __future__ import annotations

import itertools
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


def rows(task: str, examples: int = 40) -> list[tuple[list[int], list[int]]]:
    inputs, targets = generate(task, PUBLIC[task], examples, seed=0)
    assert inputs.shape == targets.shape == (examples, PUBLIC[task].length)
    assert int(inputs.min()) >= 0 and int(max(inputs.max(), targets.max())) < PUBLIC[task].tokens
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


def test_public_settings() -> None:
    assert len(TASKS) == len(PUBLIC) == 6
    sizes = {task: (setting.vocabulary, setting.length, setting.train) for task, setting in PUBLIC.items()}
    assert sizes == {
        "in_context_recall": (16, 128, 12_800),
        "fuzzy_recall": (16, 128, 12_800),
        "noisy_recall": (16, 128, 12_800),
        "selective_copying": (16, 256, 12_800),
        "compression": (16, 32, 12_800),
        "memorization": (256, 32, 256),
    }
    assert PUBLIC["fuzzy_recall"].motif == 3 and PUBLIC["noisy_recall"].noise == 0.2
    assert PUBLIC["selective_copying"].copied == 16


@pytest.mark.parametrize("task", ["in_context_recall", "noisy_recall"])
def test_recall(task: str) -> None:
    """A target is the value its key had before; every key that comes again has one."""
    noisy = 0
    for inputs, targets in rows(task):
        known: dict[int, int] = {}
        place = 0
        while place < len(inputs):
            key = inputs[place]
            if key >= 16:
                noisy += 1
                assert targets[place] == IGNORED
                place += 1
                continue
            assert key < 8 <= inputs[place + 1] < 16
            assert targets[place] == known.get(key, IGNORED) and targets[place + 1] == IGNORED
            known[key] = inputs[place + 1]
            place += 2
    assert noisy / (40 * 128) == pytest.approx(PUBLIC[task].noise, abs=0.01)


def test_fuzzy_recall() -> None:
    """What is asked is the value of a key that stood further left, all of it; of a new key nothing is asked."""
    lengths, asked = set(), 0
    for inputs, targets in rows("fuzzy_recall"):
        # Keys are of the first half of the vocabulary, values of the second: each run of either is one word.
        words = [tuple(run) for _, run in itertools.groupby(inputs, key=lambda token: token >= 8)]
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        place = 0
        for key, value in list(zip(words[::2], words[1::2], strict=False))[:-1]:  # the last may be cut
            end = place + len(key) + len(value)
            assert all(token < 8 for token in key) and value == known.get(key, value)
            # The token before each token of the value asks for it.
            expected = [*value] if key in known else [IGNORED] * len(value)
            assert targets[place:end] == [IGNORED] * (len(key) - 1) + expected + [IGNORED]
            asked += key in known
            known[key] = value
            lengths |= {len(key), len(value)}
            place = end
        assert len(inputs) - place <= 4 * 3  # two pairs at most were left out
    assert lengths == {1, 2, 3} and asked > 40


def test_selective_copying() -> None:
    for inputs, targets in rows("selective_copying"):
        tokens = [token for token in inputs if token < 16]
        assert len(tokens) == 16 and targets[-16:] == tokens and inputs[-16:] == [17] * 16
        assert set(targets[:-16]) == {IGNORED}


def test_compression() -> None:
    for inputs, targets in rows("compression"):
        assert inputs[-1] == 16 and targets[-1] == IGNORED and inputs[:-1] == targets[:-1]


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
    targets = generate("compression", SCALES["small"]["compression"], 20, seed=0).targets[:, :-1]
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
    for inputs, targets in rows("memorization") + rows("memorization"):
        for place in range(0, 32, 2):
            assert inputs[place + 1] == 256 and targets[place] == IGNORED
            assert dictionary.setdefault(inputs[place], targets[place + 1]) == targets[place + 1]
    learned = training("memorization", "public")
    pairs = zip(learned.inputs[:, ::2].flatten().tolist(), learned.targets[:, 1::2].flatten().tolist(), strict=True)
    assert all(dictionary.get(key, value) == value for key, value in pairs)


@pytest.mark.parametrize("task", TASKS)
def test_seeds_and_splits(task: str) -> None:
    setting = SCALES["small"][task]
    one = generate(task, setting, 5, 0).inputs
    assert torch.equal(one, generate(task, setting, 5, 0).inputs)
    assert not torch.equal(one, generate(task, setting, 5, 1).inputs)
    assert not torch.equal(one, generate(task, setting, 5, 0, "train").inputs)
    assert training(task).inputs.shape == (setting.train, setting.length)


def test_cells_and_errors() -> None:
    assert [cell.task for cell in cells()] == list(SCORED)
    with pytest.raises(ValueError, match="task='sorting' is not a choice; allowed: in_context_recall"):
        cells(tasks=["sorting"])
    with pytest.raises(ValueError, match="examples=0 must be a whole number"):
        generate("memorization", Setting(), 0, 0)
