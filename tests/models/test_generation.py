"""generate(): with the memory carried in the cache, the same tokens as without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from tests.models.support import PAIRS, layers_of, left_padded, small_model, token_ids

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beam": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("preset", "backbone"), PAIRS)
def test_cache_changes_nothing(preset: str, backbone: str, way: str) -> None:
    """A left-padded batch, across the ends of chunks and segments."""
    model, (ids, mask) = small_model(backbone=backbone, **layers_of(preset, "one")), left_padded(2, 6, [6, 3])
    answers = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        answers.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, use_cache=use_cache, **WAYS[way]))
    assert torch.equal(*answers)


@pytest.mark.parametrize("way", WAYS)
def test_mixed_layers(way: str) -> None:
    model, (ids, mask) = small_model(backbone="mac", **layers_of("atlas", "mixed")), left_padded(2, 6, [6, 3])
    answers = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        answers.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, use_cache=use_cache, **WAYS[way]))
    assert torch.equal(*answers)


def test_rows_are_as_if_alone() -> None:
    model, (ids, mask) = small_model(backbone="mag"), left_padded(2, 6, [6, 3])
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    alone = model.generate(ids[1:, 3:], max_new_tokens=6, do_sample=False)
    assert torch.equal(together[1:, 3:], alone)


@pytest.mark.parametrize("lengths", [[6, 6], [6, 3]])
def test_continuing_from_a_returned_cache(lengths: list[int]) -> None:
    model, (ids, mask) = small_model(backbone="mac"), left_padded(2, 6, lengths)
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    first = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], dim=1)
    second = model.generate(
        first.sequences,
        attention_mask=longer,
        past_key_values=first.past_key_values,
        max_new_tokens=5,
        do_sample=False,
    )
    assert torch.equal(second, whole)


def test_generating_after_reading() -> None:
    model, ids = small_model(backbone="mag"), token_ids(1, 20)
    cache = model.read(ids[:, :19], progress=False)
    after = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(after, model.generate(ids, max_new_tokens=4, do_sample=False))


def test_streaming_out_tokens() -> None:
    class Listener(BaseStreamer):
        def __init__(self) -> None:
            self.heard: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.heard += value.flatten().tolist()

        def end(self) -> None:
            self.heard.append(-1)

    listener = Listener()
    ids = token_ids(1, 4)
    answer = small_model().generate(ids, max_new_tokens=4, do_sample=False, streamer=listener)
    assert listener.heard == [*answer[0].tolist(), -1]


def test_caches_of_keys_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match="cache_implementation='static' is not for this model"):
        small_model().generate(token_ids(1, 4), max_new_tokens=2, cache_implementation="static")


def test_chunked_prefill() -> None:
    model, ids = small_model(backbone="mac"), token_ids(1, 11)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, prefill_chunk_size=4), expected)
