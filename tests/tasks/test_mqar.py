"""MQAR: the public settings, and sequences whose targets follow from what was read."""

from __future__ import annotations

import pytest
import torch

from atlas_memory.data import IGNORED
from atlas_memory.tasks.mqar import SCALES, Setting, cells, generate, training


def test_public_settings() -> None:
    public = SCALES["public"]
    assert public.vocabulary == 8192
    assert [(s.length, s.pairs, s.examples) for s in public.train] == [
        (64, 4, 100_000),
        (128, 8, 20_000),
        (256, 16, 20_000),
        (256, 32, 20_000),
        (256, 64, 20_000),
    ]
    assert (public.test[0].length, public.test[0].pairs) == (64, 4)
    assert (public.test[-1].length, public.test[-1].pairs) == (1024, 256)


@pytest.mark.parametrize("setting", [Setting(64, 4, 50), Setting(64, 16, 50), Setting(256, 64, 20)])
def test_every_key_is_asked_once_and_has_its_value(setting: Setting) -> None:
    inputs, targets = generate(setting, 8192, seed=0)
    assert inputs.shape == targets.shape == (setting.examples, setting.length) and inputs.dtype == torch.int64
    context = 2 * setting.pairs
    for row, asked in zip(inputs, targets, strict=True):
        pairs = dict(zip(row[0:context:2].tolist(), row[1:context:2].tolist(), strict=True))
        assert len(pairs) == len(set(pairs.values())) == setting.pairs
        assert max(pairs) < 4096 <= min(pairs.values()) and 0 not in pairs
        places = (asked != IGNORED).nonzero().flatten().tolist()
        assert min(places) >= context and sorted(row[places].tolist()) == sorted(pairs)
        assert asked[places].tolist() == [pairs[key] for key in row[places].tolist()]


@pytest.mark.parametrize("setting", SCALES["small"].test)
def test_no_key_stands_between_the_queries(setting: Setting) -> None:
    inputs, targets = generate(setting, SCALES["small"].vocabulary, seed=0)
    places = torch.arange(setting.length)
    for row, asked in zip(inputs, targets, strict=True):
        between = row[(places >= 2 * setting.pairs) & (asked == IGNORED)]
        assert not torch.isin(between, row[0 : 2 * setting.pairs : 2]).any()
    assert inputs.min() == 0 and inputs.max() == SCALES["small"].vocabulary - 1  # any other token may


def test_most_keys_come_back_soon() -> None:
    _, targets = generate(Setting(256, 4, 500), 256, seed=0)
    places = (targets != IGNORED).nonzero()[:, 1].float()
    assert places.median() < 8 + (256 - 8) / 4


def test_seeds_and_splits() -> None:
    setting = Setting(64, 4, 10)
    assert torch.equal(generate(setting, 64, 0).inputs, generate(setting, 64, 0).inputs)
    assert not torch.equal(generate(setting, 64, 0).inputs, generate(setting, 64, 1).inputs)
    assert not torch.equal(generate(setting, 64, 0).inputs, generate(setting, 64, 0, "train").inputs)
    small = training(seed=3)
    assert [len(group.inputs) for group in small] == [setting.examples for setting in SCALES["small"].train]


def test_cells_and_errors() -> None:
    made = cells([64], samples=5)
    assert (made[0].length, made[0].samples, made[0].details) == (64, 5, {"pairs": 4}) and len(made) == 3
    assert {cell.vocabulary for cell in made} == {72}
    assert made[0].examples is not None and made[0].examples() is made[0].examples()  # made once
    with pytest.raises(ValueError, match="lengths: 100 is not in scale='small'; accepted: 64, 128"):
        cells([100])
    with pytest.raises(ValueError, match="seed=-1 must be a whole number from 0 to"):
        cells(seed=-1)
    with pytest.raises(ValueError, match="scale='huge' is not a choice; allowed: public, small"):
        cells(scale="huge")
    with pytest.raises(ValueError, match="at least four times the pairs"):
        Setting(64, 17, 1)
