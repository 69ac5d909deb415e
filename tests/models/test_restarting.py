"""Rows of a cache that start a new document are as if they had never read anything."""

from __future__ import annotations

import pytest
import torch

from tests.models.support import PAIRS, layers_of, small_model, token_ids


@pytest.mark.parametrize(("preset", "backbone"), PAIRS)
def test_restarted_rows_are_fresh_and_the_others_go_on(preset: str, backbone: str) -> None:
    model = small_model(backbone=backbone, **layers_of(preset, "mixed" if backbone == "mag" else "one"))
    first, second = token_ids(3, 11), token_ids(3, 9, seed=1)
    fresh = [False, True, False]
    cache = model.model.restarted(model.read(first, progress=False), fresh)
    together = model(input_ids=second, past_key_values=cache).logits
    whole = model(input_ids=torch.cat([first, second], dim=1)).logits[:, 11:]
    torch.testing.assert_close(together[[0, 2]], whole[[0, 2]])
    torch.testing.assert_close(together[1:2], model(input_ids=second[1:2]).logits)
    assert cache.tokens_seen.tolist() == [20, 9, 20]


def test_gradients_reach_the_beginning_of_restarted_rows() -> None:
    model = small_model(backbone="lmm", preset="titans").train()
    cache = model.read(token_ids(2, 5), progress=False).detach()
    model(
        input_ids=token_ids(2, 5), past_key_values=model.model.restarted(cache, [True, False])
    ).logits.sum().backward()
    for layer in model.model.blocks:
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.memory.initial.parameters())
