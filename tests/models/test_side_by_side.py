"""Rows in threads of their own: the same states, in the same modes, and as many threads as before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from atlas_memory.models import side_by_side
from atlas_memory.models.configuration_atlas import BACKBONES
from tests.models.support import small_model, token_ids
from tests.support import assert_close


class Call(NamedTuple):
    """Of the model."""

    rows: int
    modes: tuple[bool, bool, bool]  # gradients, inference mode, autocast
    threads: int
    elsewhere: bool  # not in the thread of the test


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(side_by_side, "FEWEST_TOKENS", 4)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    made: list[Call] = []
    plain = side_by_side._read

    def watched(model: Any, ids: torch.Tensor, cache: Any) -> None:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        elsewhere = threading.current_thread() is not threading.main_thread()
        made.append(Call(len(ids), modes, torch.get_num_threads(), elsewhere))
        plain(model, ids, cache)

    monkeypatch.setattr(side_by_side, "_read", watched)
    return made


@pytest.mark.parametrize("backbone", BACKBONES)
def test_rows_are_shared_among_threads(backbone: str, calls: list[Call]) -> None:
    model, ids = small_model(backbone=backbone), token_ids(3, 17)
    cache = model.read(ids, step=9, progress=False)
    assert sorted(call.rows for call in calls) == [1, 1, 2, 2]
    assert {call[1:] for call in calls} == {((False, False, False), 1, True)}
    with torch.no_grad():
        expected = model(ids, use_cache=True).past_key_values
    assert cache.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert layer.state.position == other.state.position
        for tensor, right in zip(layer.state.tensors(), other.state.tensors(), strict=True):
            assert_close(tensor, right)


def test_threads_work_in_the_modes_of_the_call(calls: list[Call]) -> None:
    model, ids = small_model(dtype=torch.float32), token_ids(2, 8)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        cache = model.read(ids, progress=False)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = model(ids, use_cache=True).past_key_values
    assert [call.modes for call in calls] == [(False, True, True)] * 2
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        for tensor, right in zip(layer.state.tensors(), other.state.tensors(), strict=True):
            assert tensor.dtype == right.dtype
            torch.testing.assert_close(tensor, right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("why", ["one row", "few tokens", "a hook"])
def test_one_thread_where_more_would_not_do(why: str, calls: list[Call]) -> None:
    model, ids = small_model(), token_ids(1 if why == "one row" else 2, 3 if why == "few tokens" else 8)
    if why == "a hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    model.read(ids, progress=False)
    assert calls == [Call(len(ids), (False, False, False), 2, elsewhere=False)]


@pytest.mark.parametrize("step", [4, 8])
def test_an_error_in_a_thread_leaves_the_cache_as_it_was(step: int) -> None:
    model, ids = small_model(), token_ids(2, 8)
    cache = model.read(ids, progress=False)
    states = [layer.state for layer in cache.layers]
    with torch.no_grad():
        model.model.embed_tokens.weight[ids[1, 5]] = torch.nan
    with pytest.raises(ValueError, match="only finite ones are accepted"):
        model.read(ids, cache, step=step, progress=False)
    assert [layer.state for layer in cache.layers] == states
    assert cache.get_seq_length() == 8


@pytest.mark.parametrize("kept", [1, 3])
def test_a_cache_of_other_rows_is_refused(kept: int) -> None:
    model = small_model()
    cache = model.read(token_ids(kept, 8), progress=False)
    with pytest.raises(ValueError, match=f"past_key_values has {kept} rows, but the tokens have 2"):
        model.read(token_ids(2, 8), cache, progress=False)
    assert cache.tokens_seen.tolist() == [8] * kept
    with pytest.raises(ValueError, match="past_key_values must be an AtlasCache"):
        model.read(token_ids(2, 8), "cache", progress=False)  # type: ignore[arg-type]


def test_no_thread_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane is held up at its first piece until the other has read as many as may wait."""
    model, ids = small_model(), token_ids(2, 40)
    ahead, plain, first = threading.Event(), side_by_side._read, []

    def held_up(model: Any, ids: torch.Tensor, cache: Any) -> None:
        me = threading.get_ident()
        first.append(me)
        if me == first[0] and not ahead.is_set():
            assert ahead.wait(60)
        plain(model, ids, cache)
        if first.count(me) > side_by_side.AHEAD and me != first[0]:
            ahead.set()

    monkeypatch.setattr(side_by_side, "_read", held_up)
    cache = model.read(ids, step=4, progress=False)
    assert ahead.is_set() and cache.tokens_seen.tolist() == [40, 40]
