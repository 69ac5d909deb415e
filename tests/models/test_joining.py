"""Models side by side in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atlas_memory import AtlasForCausalLM
from atlas_memory.models.joining import join
from tests.models.support import PAIRS, layers_of, small_model, token_ids
from tests.support import assert_close

NARROW = {"hidden_size": 4, "num_attention_heads": 1, "intermediate_size": 6, "memory_heads": 1}

UNEQUAL = {"preset": "gated_deltanet", "memory": {"key_width": 4, "value_width": 6}}
RECURRENT = {"layer_types": ["memory_tokens", "titans"], "num_hidden_layers": 2}
MODELS = [{"backbone": backbone, **layers_of(preset, "mixed")} for preset, backbone in PAIRS] + [RECURRENT, UNEQUAL]


def logits_of(model: AtlasForCausalLM) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(token_ids(2, 21)).logits
    return logits


def without_norms(**fields: Any) -> AtlasForCausalLM:
    """Norms that only scale: with an epsilon this large, what stands beside a part does not touch it."""
    model = small_model(rms_norm_eps=1e12, **fields)
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "between.weight", "attended.weight", "remembered.weight")):
            weight.data *= 1e6
    return model


@pytest.mark.parametrize("fields", MODELS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_the_parts_answer_as_they_did(fields: dict[str, Any]) -> None:
    wide, narrow = without_norms(**fields), without_norms(**fields, **NARROW)
    joined = join([wide, narrow])
    assert (joined.config.hidden_size, joined.config.memory_heads) == (12, 3)
    expected = (logits_of(wide) + logits_of(narrow)) / 2
    assert (logits_of(wide) - logits_of(narrow)).abs().max() > 0.01
    assert_close(logits_of(joined), expected, "logits")


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_joined_with_itself_is_that_model(tied: bool) -> None:
    model = small_model(preset="atlas", tie_word_embeddings=tied, persistent_tokens=2)
    assert_close(logits_of(join([model, model, model])), logits_of(model), "logits")


def test_all_of_a_joined_model_learns() -> None:
    joined = join([small_model(), small_model(**NARROW)]).train()
    joined(token_ids(2, 21), labels=token_ids(2, 21)).loss.backward()
    between = joined.model.layers[0].block.feed_forward.gate_up.weight
    assert not between[0, 8:].any()
    assert between.grad[0, 8:].all()


def test_parts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="parts is empty"):
        join([])
    with pytest.raises(ValueError, match="parts differ in sliding_window: 5, 3"):
        join([small_model(), small_model(sliding_window=3)])
    with pytest.raises(ValueError, match="heads of attention must be equally wide"):
        join([small_model(), small_model(num_attention_heads=1)])
