"""AtlasCache under the verbs of transformers' caches."""

from __future__ import annotations

import pytest
import torch

from atlas_memory import AtlasCache
from tests.models.support import small_model, token_ids
from tests.support import assert_close


def _read(count: int = 9, batch: int = 2) -> tuple[object, torch.Tensor, AtlasCache]:
    model, ids = small_model(backbone="mac"), token_ids(batch, count + 3)
    with torch.no_grad():
        return model, ids, model(ids[:, :count]).past_key_values


def test_an_empty_cache() -> None:
    cache = AtlasCache(3)
    assert (len(cache), cache.get_seq_length(), cache.batch_size, cache.nbytes) == (3, 0, -1, 0)
    assert not cache.is_initialized
    assert not cache.is_compileable
    cache.reorder_cache(torch.tensor([0]))
    cache.crop(0)


def test_what_it_answers() -> None:
    _, _, cache = _read()
    assert cache.get_seq_length() == cache.get_seq_length(1) == 9
    assert cache.get_mask_sizes(2, 0) == (11, 0)
    assert cache.get_max_length() == -1
    assert cache.batch_size == 2
    assert cache.tokens_seen.tolist() == [9, 9]
    assert cache.nbytes > 0


@pytest.mark.parametrize("rows", [[1, 0], [1, 1], [0]])
def test_rows_are_reordered(rows: list[int]) -> None:
    model, ids, cache = _read()
    expected = model(ids[rows, 9:], past_key_values=model(ids[rows, :9]).past_key_values).logits
    cache.reorder_cache(torch.tensor(rows))
    assert_close(model(ids[rows, 9:], past_key_values=cache).logits, expected)


def test_rows_are_repeated() -> None:
    model, ids, cache = _read()
    rows = [0, 0, 1, 1]
    expected = model(ids[rows, 9:], past_key_values=model(ids[rows, :9]).past_key_values).logits
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    assert_close(model(ids[rows, 9:], past_key_values=cache).logits, expected)


def test_copies_go_their_own_way() -> None:
    model, ids, cache = _read()
    other = cache.copy()
    first = model(ids[:, 9:], past_key_values=cache).logits
    assert (cache.get_seq_length(), other.get_seq_length()) == (12, 9)
    assert torch.equal(model(ids[:, 9:], past_key_values=other).logits, first)


def test_gradients_reach_through_it_unless_detached() -> None:
    model, ids = small_model(backbone="mag"), token_ids(1, 8)
    for detached in (False, True):
        cache = model(ids[:, :4]).past_key_values
        cache = cache.detach() if detached else cache
        model.zero_grad()
        model(ids[:, 4:], past_key_values=cache).logits.sum().backward()
        embedding = model.get_input_embeddings().weight.grad
        only_read = [t for t in ids[0, :4].tolist() if t not in ids[0, 4:].tolist()]
        assert embedding[only_read].any() != detached


def test_reset_and_crop() -> None:
    model, ids, cache = _read()
    with pytest.raises(ValueError, match=r"crop\(2\): a memory cannot unread tokens"):
        cache.crop(2)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


def test_offloading_keeps_the_state() -> None:
    model, ids, cache = _read()
    expected = model(ids[:, 9:], past_key_values=cache.copy()).logits
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert_close(model(ids[:, 9:], past_key_values=cache).logits, expected)


def test_keys_and_values_are_not_for_it() -> None:
    with pytest.raises(NotImplementedError, match="filled by the model's own layers"):
        AtlasCache(1).update(torch.zeros(1), torch.zeros(1), 0)
