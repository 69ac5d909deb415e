"""model.read: any number of tokens, in steps, into a cache of constant size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from atlas_memory.models.configuration_atlas import ATTENTION_LAYERS, BACKBONES
from tests.models.support import small_model, token_ids
from tests.support import assert_close

COUNT = 23

SOURCES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda ids: ids,
    "one dimension": lambda ids: ids[0],
    "16 bits": lambda ids: ids.to(torch.uint16),
    "array": lambda ids: ids.numpy().astype(np.uint16),
    "iterator of arrays": lambda ids: iter([ids[:, :9].numpy(), ids[:, 9:].numpy().astype(np.uint8)]),
    "list": lambda ids: ids[0].tolist(),
    "iterator of ids": lambda ids: iter(ids[0].tolist()),
    "iterator of pieces": lambda ids: iter([ids[:, :9], ids[:, 9:10], ids[:, 10:]]),
    "iterator of lists": lambda ids: iter([ids[0, :1].tolist(), ids[0, 1:].tolist()]),
    "iterator of numbers of arrays": lambda ids: iter(ids[0].numpy()),
    "iterator of numbers of tensors": lambda ids: iter(ids[0]),
    "ids and pieces": lambda ids: iter([*ids[0, :4].tolist(), ids[0, 4:20], *ids[0, 20:].tolist()]),
}


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize("source", SOURCES)
def test_sources(source: str, step: int) -> None:
    model, ids, more = small_model(backbone="mac"), token_ids(1, COUNT), token_ids(1, 3, seed=1)
    cache = model.read(SOURCES[source](ids), step=step, progress=False)
    assert cache.tokens_seen.tolist() == [COUNT]
    expected = model(torch.cat([ids, more], dim=1)).logits[:, COUNT:]
    assert_close(model(more, past_key_values=cache).logits, expected)


LAYERS = {name: {"backbone": name} for name in BACKBONES} | {
    name: {"layer_types": [name], "num_hidden_layers": 1} for name in ATTENTION_LAYERS
}


@pytest.mark.parametrize("layers", LAYERS)
def test_going_on(layers: str) -> None:
    """Reading leaves out what only the output needs; what is remembered is the same."""
    model, ids = small_model(**LAYERS[layers]), token_ids(2, COUNT)
    cache = model.read(ids[:, :9], progress=False)
    assert model.read(ids[:, 9:], cache, progress=False) is cache
    whole = model(ids).past_key_values
    for layer, expected in zip(cache.layers, whole.layers, strict=True):
        for name, part in layer.state.parts.items():
            assert part.position == expected.state.parts[name].position
        for tensor, other in zip(layer.state.tensors(), expected.state.tensors(), strict=True):
            assert_close(tensor, other.detach())


def test_reading_leaves_out_the_last_feed_forward_layer() -> None:
    model, asked = small_model(), []
    for block in model.model.blocks:
        block.feed_forward.register_forward_hook(lambda *_: asked.append(1))
    model.read([1, 2, 3], progress=False)
    assert len(asked) == len(model.model.blocks) - 1


def test_size_is_constant_and_nothing_is_kept_for_gradients() -> None:
    model = small_model(backbone="mal")

    def stream() -> Iterator[int]:
        for number in range(200):
            yield number % 20 + 1

    cache = model.read(stream(), step=16, progress=False)
    assert cache.nbytes == model.read([1], progress=False).nbytes
    assert not any(tensor.requires_grad for layer in cache.layers for tensor in layer.state.tensors())


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    small_model().read(token_ids(1, COUNT), step=5)
    assert "reading" in capsys.readouterr().err


def test_ids_of_three_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens must have shape \(tokens,\) or \(batch, tokens\), got \(2, 2, 3\)"):
        small_model().read(torch.ones(2, 2, 3, dtype=torch.long), progress=False)


def test_nothing_to_read() -> None:
    assert small_model().read([], progress=False).get_seq_length() == 0


def test_only_the_model_without_a_head_reads_for_its_cache_alone() -> None:
    model, ids = small_model(), token_ids(1, 3)
    with pytest.raises(ValueError, match=r"only_cache=True .* read\(tokens, past_key_values\), or model\.model\("):
        model(ids, only_cache=True)
    assert torch.equal(model(ids, labels=ids, only_cache=False).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tokens": [1], "step": 0}, "step=0"),
        ({"tokens": [99]}, "input_ids between"),
        ({"tokens": torch.ones(1, 3)}, "input_ids must be whole numbers .* got torch.float32"),
        ({"tokens": torch.ones(1, 3).bool()}, "input_ids must be whole numbers .* got torch.bool"),
        ({"tokens": iter([token_ids(1, 3), token_ids(2, 3)])}, "tokens must keep their batch: 1 rows, then 2"),
        ({"tokens": [1], "past_key_values": {}}, "past_key_values must be an AtlasCache"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        small_model().read(**arguments, progress=False)
