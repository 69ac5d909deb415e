"""The model's forward pass: cut, padded, packed; what it returns; what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from atlas_memory import AtlasCache, AtlasForCausalLM, AtlasModel, Memory, presets
from atlas_memory.models.configuration_atlas import BACKBONES
from tests.models.support import SEGMENT, VOCABULARY, layers_of, left_padded, small_config, small_model, token_ids
from tests.support import assert_close

COUNT = SEGMENT + 4

every_model = pytest.mark.parametrize(
    ("preset", "backbone", "layers"),
    list(itertools.product(presets.names(), BACKBONES, ["one", "mixed"])),
)


@every_model
def test_invariants(preset: str, backbone: str, layers: str) -> None:
    """With a cache, split anywhere; left-padded; packed: the logits are those of each sequence alone, in one call."""
    model = small_model(backbone=backbone, **layers_of(preset, layers))
    ids = token_ids(2, COUNT)
    with torch.no_grad():
        whole = model(ids).logits
        cache, parts = None, []
        for begin, end in itertools.pairwise([0, 1, 2, 7, COUNT]):
            outputs = model(ids[:, begin:end], past_key_values=cache)
            cache, parts = outputs.past_key_values, [*parts, outputs.logits]
        assert_close(torch.cat(parts, dim=1), whole, "split")
        assert cache.get_seq_length() == COUNT
        padded, mask = left_padded(2, COUNT, [COUNT, 5])
        assert_close(model(padded, attention_mask=mask).logits[1:, -5:], model(padded[1:, -5:]).logits, "padded")
        packed = model(ids.reshape(1, -1)[:, : COUNT + 3], cu_seqlens=[0, COUNT, COUNT + 3])
        assert_close(packed.logits[:, :COUNT], whole[:1], "first of the packed")
        assert_close(packed.logits[:, COUNT:], model(ids[1:, :3]).logits, "second of the packed")


@pytest.mark.parametrize("backbone", BACKBONES)
def test_future_is_not_seen(backbone: str) -> None:
    model, ids = small_model(backbone=backbone, **layers_of("atlas", "mixed")), token_ids(1, COUNT)
    other = ids.clone()
    other[:, 9] = ids[:, 9] % (VOCABULARY - 1) + 1
    first, second = model(ids).logits, model(other).logits
    assert_close(second[:, :9], first[:, :9], "before")
    assert not torch.allclose(second[:, 9], first[:, 9])


@pytest.mark.parametrize("form", ["position_ids", "cu_seqlens", "cu_seq_lens_q"])
def test_packing_in_all_its_forms(form: str) -> None:
    model, ids = small_model(backbone="mac"), token_ids(1, 9)
    given: dict[str, Any] = {
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]),
        "cu_seqlens": [0, 5, 9],
        "cu_seq_lens_q": torch.tensor([0, 5, 9], dtype=torch.int32),
    }
    outputs = model(ids, labels=ids, **{form: given[form]})
    alone = [model(part, labels=part) for part in (ids[:, :5], ids[:, 5:])]
    assert_close(outputs.logits, torch.cat([part.logits for part in alone], dim=1), "logits")
    expected = (alone[0].loss * 4 + alone[1].loss * 3) / 7  # no sequence predicts the first token of the next
    assert_close(outputs.loss, expected, "loss", relative=1e-5)
    assert outputs.past_key_values.tokens_seen.tolist() == [5, 4]


def test_outputs() -> None:
    model, ids = small_model(), token_ids(2, 6)
    outputs = model(ids, output_hidden_states=True, labels=ids)
    assert len(outputs.hidden_states) == 3
    assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
    assert_close(model(ids, logits_to_keep=2).logits, outputs.logits[:, -2:])
    assert_close(model(ids, logits_to_keep=torch.tensor([0, 3])).logits, outputs.logits[:, [0, 3]])
    shifted = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    assert_close(outputs.loss, shifted, "loss", relative=1e-5)
    _, logits, cache = model(ids, labels=ids, return_dict=False)
    assert torch.equal(logits, outputs.logits)
    assert isinstance(cache, AtlasCache)
    assert model(ids, use_cache=False).past_key_values is None
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
    assert torch.equal(embedded.logits, outputs.logits)


def test_mask_of_everything_or_of_the_new() -> None:
    model, (ids, mask) = small_model(), left_padded(2, 9, [9, 4])
    whole = model(ids, attention_mask=mask).logits
    for second in (mask, mask[:, 6:]):
        cache = model(ids[:, :6], attention_mask=mask[:, :6]).past_key_values
        assert_close(model(ids[:, 6:], attention_mask=second, past_key_values=cache).logits, whole[:, 6:])


def test_an_error_leaves_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_model(), token_ids(1, 6)
    cache = model(ids[:, :3]).past_key_values
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="midway"):

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("midway")

        patch.setattr(model.model.layers[1], "forward", fail)
        model(ids[:, 3:], past_key_values=cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [3, 3]
    assert_close(model(ids[:, 3:], past_key_values=cache).logits, model(ids).logits[:, 3:])


def test_registered() -> None:
    config = small_config()
    assert isinstance(AutoModelForCausalLM.from_config(config), AtlasForCausalLM)
    assert isinstance(AutoModel.from_config(config), AtlasModel)


def test_vocabulary_can_grow() -> None:
    model, ids = small_model(), token_ids(1, 5)
    before = model(ids).logits
    model.resize_token_embeddings(VOCABULARY + 4, mean_resizing=False)
    assert model.config.vocab_size == VOCABULARY + 4
    assert_close(model(ids).logits[..., :VOCABULARY], before)
    model(ids + 4)


# Initial weights.


def test_memory_keeps_its_own_start() -> None:
    """The gates' biases, the convolution, the initial weights: whatever a Memory starts with."""
    model = AtlasForCausalLM(small_config(preset="atlas", hidden_size=64, memory={"key_width": 16, "initial_rank": 3}))
    fresh = Memory(64, 2, "atlas", key_width=16, initial_rank=3)
    for layer in model.model.layers:
        for name, parameter in layer.block.memory.named_parameters():
            parameter, expected = parameter.detach(), fresh.get_parameter(name).detach()
            assert parameter.shape == expected.shape, name
            assert abs(parameter.mean() - expected.mean()) < 0.3 * expected.std() + 1e-6, name
            torch.testing.assert_close(parameter.std(), expected.std(), rtol=0.3, atol=1e-6)
        assert torch.equal(layer.block.memory.gates.projection.bias, fresh.gates.projection.bias)
        assert torch.equal(layer.block.norm.weight, torch.ones(64))
        torch.testing.assert_close(layer.block.feed_forward.down.weight.std(), torch.tensor(0.02), rtol=0.1, atol=0)


# Bad input.


def _bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    ids = token_ids(2, 6)
    return {
        "ids too large": ({"input_ids": ids + VOCABULARY}, "input_ids between .* must lie between 0 and"),
        "negative ids": ({"input_ids": ids * -1}, "input_ids between"),
        "ids of another shape": (
            {"input_ids": ids[0]},
            r"input_ids must be whole numbers .* of shape \(batch, tokens\)",
        ),
        "ids of 16 bits": ({"input_ids": ids.to(torch.int16)}, "input_ids must be whole numbers"),
        "ids that are not whole": ({"input_ids": ids.float()}, "input_ids must be whole numbers"),
        "mask": ({"input_ids": ids, "attention_mask": torch.ones(2, 5)}, r"attention_mask must have shape .*\(2, 6\)"),
        "mask of four dimensions": ({"input_ids": ids, "attention_mask": torch.ones(2, 1, 6, 6)}, "attention_mask"),
        "hole in the mask": (
            {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]] * 2)},
            "padding between real tokens",
        ),
        "nothing": ({}, "exactly one of input_ids and inputs_embeds"),
        "embeddings of another width": (
            {"inputs_embeds": torch.zeros(2, 6, 9)},
            r"inputs_embeds must have shape .*8\)",
        ),
        "a flag for each row": ({"input_ids": ids, "fresh": [True]}, "fresh=.* must hold a flag for each of 2 rows"),
        "both": ({"input_ids": ids, "inputs_embeds": torch.zeros(2, 6, 8)}, "exactly one of"),
        "cache of another kind": ({"input_ids": ids, "past_key_values": {}}, "past_key_values must be an AtlasCache"),
        "cache of fewer layers": ({"input_ids": ids, "past_key_values": AtlasCache(1)}, "has 1 layers"),
        "cache of another preset": (
            {"input_ids": ids, "past_key_values": small_model(preset="ttt")(ids).past_key_values},
            "past_key_values is of another config; layer 0: .* fields differ: optimizer",
        ),
        "cache of another backbone": (
            {"input_ids": ids, "past_key_values": small_model(backbone="lmm")(ids).past_key_values},
            "past_key_values is of another config; layer 0: state has parts",
        ),
        "cache of another window": (
            {"input_ids": ids, "past_key_values": small_model(sliding_window=7)(ids).past_key_values},
            "past_key_values is of another config; layer 0: state has keys of shape",
        ),
        "cache of other rows": (
            {"input_ids": ids, "past_key_values": small_model()(ids[:1]).past_key_values},
            "state has 1 rows, but the input has 2",
        ),
    }


def test_rows_may_start_anew_in_both_models() -> None:
    model, ids = small_model(), token_ids(2, 6)
    cache = model(ids).past_key_values
    asked = model(ids, past_key_values=cache, fresh=[True, False]).logits
    assert_close(asked[:1], model(ids[:1]).logits)
    assert not torch.allclose(asked[1:], model(ids[1:]).logits)


def test_hidden_states_may_be_asked_for_by_the_config() -> None:
    assert len(small_model(output_hidden_states=True)(token_ids(1, 3)).hidden_states) == 3


def test_assisted_generation_is_refused() -> None:
    with pytest.raises(ValueError, match="stateful"):
        small_model().generate(token_ids(1, 6), prompt_lookup_num_tokens=2, max_new_tokens=4)


@pytest.mark.parametrize("name", _bad_calls())
def test_bad_input_is_named(name: str) -> None:
    arguments, named = _bad_calls()[name]
    with pytest.raises(ValueError, match=named):
        small_model()(**arguments)
