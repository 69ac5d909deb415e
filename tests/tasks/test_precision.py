"""Which precision texts are read in where nobody says."""

from __future__ import annotations

import pytest
import torch

from atlas_memory.tasks import precision
from atlas_memory.tasks.precision import AUTO, PRECISIONS, chosen_precision


def test_what_is_named_is_taken() -> None:
    assert [chosen_precision(name) for name in PRECISIONS] == list(PRECISIONS)
    with pytest.raises(ValueError, match="precision='half' is not a choice; allowed: auto, float32, bfloat16"):
        chosen_precision("half")


@pytest.mark.parametrize("faster", PRECISIONS)
def test_else_what_this_processor_multiplies_fastest(monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(precision, "_seconds", lambda dtype: 1.0 if dtype == getattr(torch, faster) else 2.0)
    assert chosen_precision(AUTO) == faster


@pytest.mark.parametrize(("supported", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_on_an_accelerator_what_it_has(monkeypatch: pytest.MonkeyPatch, supported: bool, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert chosen_precision(AUTO) == chosen


def test_products_are_timed() -> None:
    assert all(0 < precision._seconds(getattr(torch, name)) < 10 for name in PRECISIONS)
