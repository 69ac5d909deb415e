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


# A dot product only adds to what was written before. Without forgetting it cannot overwrite, and with it not one fact
# alone: to these, every fact is told once. `swla` and `transformer` learn to overwrite all the same.
TOLD_ONCE = {"linear_attention", "gated_linear_attention", "dla", "deep_transformer", "swdt"}
# Steps to 90 %, where 600 are not enough.
STEPS = {"gated_linear_attention": 1200, "omeganet": 1000, "deep_transformer": 1200, "swdt": 1200}


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets.names())
def test_recall_after_two_hundred_tokens_is_learned(preset: str) -> None:
    task = Task(gap=200, rounds=1 if preset in TOLD_ONCE else 2)
    torch.manual_seed(0)
    model = TwoLayers(task.vocabulary, preset, key_width=16, chunk=16)
    assert train(model, task, steps=STEPS.get(preset, 600), batch=32, rate=6e-3) >= 0.9
