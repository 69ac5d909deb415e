"""It learns: a guard that keeps the numbers finite but stops the memory from learning is a failure."""

from __future__ import annotations

import pytest
import torch

from atlas_memory import presets
from tests.learning.recall import Task, TwoLayers, train

# Few keys, a short gap: a task of seconds, which a memory that cannot bind or overwrite still fails (chance: 1 in 4).
SHORT = Task(keys=4, values=4, noise=8, facts_stretch=24, gap=16)


@pytest.mark.parametrize("preset", ["atlas", "gated_deltanet", "titans"])
def test_short_recall_is_learned(preset: str) -> None:
    torch.manual_seed(0)
    model = TwoLayers(SHORT.vocabulary, preset, key_width=16, chunk=8)
    assert train(model, SHORT, steps=150, batch=32, rate=6e-3) >= 0.9


# A dot product only adds to what was written before. Deep ones with infinite features do not learn to overwrite, linear
# attention hardly does: to these, every fact is told once.
TOLD_ONCE = {"linear_attention", "deep_transformer", "swdt"}


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets.names())
def test_recall_after_two_hundred_tokens_is_learned(preset: str) -> None:
    task = Task(gap=200, rounds=1 if preset in TOLD_ONCE else 2)
    torch.manual_seed(0)
    model = TwoLayers(task.vocabulary, preset, key_width=16, chunk=16)
    assert train(model, task, steps=600, batch=32, rate=6e-3) >= 0.9
