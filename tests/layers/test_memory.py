"""The layer: its arguments, what its parts do, and reading without writing. What it keeps is in tests/invariants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from atlas_memory import Memory, MemorySpec, MemoryState, Monitors, presets
from atlas_memory.ops import memorize
from atlas_memory.ops.features import feature_map
from tests.support import (
    CHUNK,
    assert_close,
    assert_states_identical,
    small_memory,
    tokens,
)

DIM = 6


@pytest.mark.parametrize("preset", presets.names())
def test_shapes_with_published_widths(preset: str) -> None:
    """The defaults of every preset, as they are."""
    memory = Memory(32, heads=2, preset=preset)
    y, state = memory(torch.randn(1, 3, 32))
    assert y.shape == (1, 3, 32)
    assert state.spec == memory.spec == presets[preset]
    assert state.tokens_seen.tolist() == [3]


def test_fields_are_overridden_by_keyword() -> None:
    memory = Memory(8, 2, "titans", chunk=5, limiter=False, retraction=None)
    assert memory.spec == presets.make("titans", chunk=5, limiter=False, retraction=None)
    spec = MemorySpec(network="matrix", key_width=3)
    assert Memory(8, 2, spec=spec).spec == spec
    assert Memory(8, 2, spec=spec, window=3).spec == spec.replace(window=3)


def test_state_dict_carries_everything() -> None:
    memory, x = small_memory("atlas"), tokens(2, 9)
    other = Memory(DIM, 2, spec=memory.spec).double()
    assert not torch.allclose(other(x)[0], memory(x)[0])
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other(x)[0], memory(x)[0])


def test_coefficients_of_the_polynomial_are_learned_and_shared() -> None:
    memory = small_memory("omeganet")
    assert memory.coefficients.shape == (3,)
    assert "coefficients" in memory.state_dict()
    assert small_memory("titans").coefficients is None


def test_scale_of_the_coefficients_does_not_matter() -> None:
    """φ of a unit vector is a unit vector, so that a step in (0, 1) means the same whatever has been learned."""
    memory, x = small_memory("omeganet"), tokens(2, 9)
    expected, _ = memory(x)
    with torch.no_grad():
        memory.coefficients.mul_(3)
    assert_close(memory(x)[0], expected, "outputs")


def test_layer_is_the_operator_between_projections() -> None:
    """Written out once, plainly: projection, causal convolution, SiLU, unit keys, memory, norm, gate, projection."""
    memory, x = small_memory("titans"), tokens(2, 9)
    raw = F.linear(x, memory.tokens.weight)
    padded = F.pad(raw, (0, 0, 3, 0))
    mixed = sum(padded[:, j : j + 9] * memory.mixing[:, 0, j] for j in range(4))
    parts = F.silu(mixed).unflatten(-1, (3, 2, 3)).unbind(2)
    queries, keys = (F.normalize(part, dim=-1) for part in parts[:2])
    answers, _ = memorize(memory.spec, queries, keys, parts[2], memory.gates(x), memory.initial())
    normed = answers * torch.rsqrt(answers.square().mean(-1, keepdim=True) + 1e-5) * memory.norm
    expected = F.linear(normed.flatten(-2) * F.silu(F.linear(x, memory.output_gate.weight)), memory.output.weight)
    assert_close(memory(x)[0], expected, "outputs")


@pytest.mark.parametrize("convolution", [1, 2, 4])
@pytest.mark.parametrize("preset", ["deltanet", "atlas"])
def test_convolution_of_any_width(preset: str, convolution: int) -> None:
    memory, x = small_memory(preset, convolution=convolution), tokens(2, 7)
    whole, _ = memory(x)
    first, state = memory(x[:, :2])
    second, _ = memory(x[:, 2:], state)
    assert ("conv.tail" in state.tensors) == (convolution > 1)
    assert_close(torch.cat([first, second], dim=1), whole, "outputs")


def test_wide_features_start_from_a_few_pairs() -> None:
    """Thousands of initial parameters, not millions; and the state holds the weights they are."""
    memory = Memory(16, 2, "atlas", key_width=16, initial_rank=3)
    assert set(memory.initial.keys) == set(memory.initial.vectors) == {"up"}
    assert set(memory.initial.full) == {"down"}
    weight = memory.initial()["up"]
    assert weight.shape == (2, 32, 153)
    _, state = memory(torch.randn(1, 1, 16))
    assert_close(state.tensors["weights.up"][0], weight)

    memory, x = memory.double(), F.normalize(torch.randn(2, 50, 16, dtype=torch.float64), dim=-1)
    weight = memory.initial()["up"]
    keys = 4 * F.normalize(memory.initial.keys["up"], dim=-1)
    feature = feature_map(memory.spec, None, x)
    assert_close(feature.expand(x) @ weight.mT, feature.kernel(x, keys) @ memory.initial.vectors["up"].mT)


def test_infinite_features_start_from_as_many_pairs_as_wanted() -> None:
    memory = Memory(16, 2, "deep_transformer", key_width=4, initial_pairs=200)
    assert memory.initial()["up"].shape == (2, 8, 200)
    assert memory(torch.randn(1, 3, 16))[0].isfinite().all()


def test_what_wide_features_start_from_tells_keys_apart() -> None:
    """Hidden units vary over random keys by all that the features hold but the constant; what keys share is gone."""
    memory = Memory(16, 8, "omeganet", key_width=32)
    x = F.normalize(torch.randn(4000, 32), dim=-1)
    coefficients = memory._coefficients()
    hidden = feature_map(memory.spec, coefficients, x).expand(x) @ memory.initial()["up"].mT  # (H, N, hidden)
    assert hidden.square().mean().item() == pytest.approx(1 - coefficients[0].item() ** 2, rel=0.15)
    assert hidden.mean(1).square().mean().item() < 0.02


# Recall.


@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 2])
@pytest.mark.parametrize("preset", presets.names())
def test_recall_is_what_the_last_token_read(preset: str, count: int) -> None:
    """Without a convolution, whose past differs: the same token asks the same question."""
    memory, x = small_memory(preset, convolution=1), tokens(2, count)
    y, state = memory(x)
    assert_close(memory.recall(x[:, -1:], state), y[:, -1:], "answers")


@pytest.mark.parametrize("preset", presets.names())
def test_recall_leaves_the_state_alone(preset: str) -> None:
    memory, x = small_memory(preset), tokens(2, CHUNK + 2)
    _, state = memory(x)
    before = state.clone()
    first = memory.recall(x, state)
    assert torch.equal(memory.recall(x, state), first)
    assert_states_identical(state, before)


def test_recall_continues_the_convolution() -> None:
    """A question is read after what came before it: its first tokens see the tail of the text."""
    memory, question = small_memory("titans"), tokens(2, 3, seed=5)
    answers = []
    for seed in (0, 1):
        _, state = memory(tokens(2, CHUNK, seed=seed))
        others = {name: tensor for name, tensor in state.tensors.items() if name == "conv.tail"}
        _, base = memory(tokens(2, CHUNK, seed=2))
        answers.append(memory.recall(question, base.updated(others)))
    assert not torch.allclose(answers[0][:, 0], answers[1][:, 0])


@pytest.mark.parametrize("answered", [0, 1, CHUNK + 2])
def test_the_last_tokens_alone_are_answered(answered: int) -> None:
    memory, x = small_memory("titans"), tokens(2, CHUNK + 2)
    y, state = memory(x)
    last, after = memory(x, answered=answered)
    assert_close(last, y[:, CHUNK + 2 - answered :], "answers")
    assert_states_identical(after, state)


def test_answers_that_cannot_be_given_are_refused() -> None:
    memory, x = small_memory("titans"), tokens(2, 5)
    with pytest.raises(ValueError, match="answered=6 must be at most the 5 tokens"):
        memory(x, answered=6)
    with pytest.raises(ValueError, match="answered=1 is for rows without padding"):
        memory(x, answered=1, mask=torch.ones(2, 5))


# Bad input.

BAD: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], str]] = {
    "two dimensions": (lambda x: {"x": x[0]}, r"x must have shape \(batch, tokens, 6\), got \(5, 6\)"),
    "another width": (lambda x: {"x": x[..., :4]}, "x must have shape"),
    "integers": (lambda x: {"x": x.long()}, "x must be torch.float64"),
    "another precision": (lambda x: {"x": x.float()}, "x must be torch.float64"),
    "another device": (lambda x: {"x": x.to("meta")}, "x is on meta, the layer on cpu"),
    "NaN": (lambda x: {"x": x * torch.nan}, "x holds NaN or infinite numbers"),
    "infinity": (lambda x: {"x": x / 0}, "x holds NaN or infinite numbers"),
    "state of another kind": (lambda x: {"x": x, "state": {"weights": x}}, "state must be a MemoryState"),
}


@pytest.mark.parametrize("method", ["forward", "reference", "recall"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str, method: str) -> None:
    memory, x = small_memory("atlas"), tokens(2, 5)
    change, named = BAD[name]
    _, state = memory(x)
    arguments = {"state": state, **change(x)}
    with pytest.raises(ValueError, match=named):
        getattr(memory, method)(**arguments)


OTHER_STATES: dict[str, tuple[Callable[[torch.Tensor, MemoryState], MemoryState], str]] = {
    "spec": (lambda x, _: small_memory("titans")(x)[1], "state belongs to another memory; fields differ"),
    "rows": (lambda _, state: state.select([0]), "state has 1 rows, but the input has 2"),
    "heads": (lambda x, _: small_memory("atlas", heads=3)(x)[1], "state has .* of shape"),
    "convolution": (lambda x, _: small_memory("atlas", convolution=2)(x)[1], r"state has conv\.tail of shape"),
    "device": (lambda _, state: state.to("meta"), "state is on meta"),
}


@pytest.mark.parametrize("method", ["forward", "reference", "recall"])
@pytest.mark.parametrize("difference", OTHER_STATES)
def test_state_of_another_memory(difference: str, method: str) -> None:
    memory, x = small_memory("atlas"), tokens(2, 5)
    other, named = OTHER_STATES[difference]
    with pytest.raises(ValueError, match=named):
        getattr(memory, method)(x, other(x, memory(x)[1]))


@pytest.mark.parametrize("method", ["forward", "reference"])
@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"mask": torch.ones(2, 4)}, "mask must have shape"),
        ({"mask": torch.tensor([[1, 0, 1, 1, 1]] * 2)}, "mask row 0 has padding between"),
        ({"cu_seqlens": [0, 5]}, "cu_seqlens needs one row"),
        ({"mask": torch.ones(2, 5), "cu_seqlens": [0, 5]}, "mask and cu_seqlens exclude each other"),
    ],
)
def test_bad_layouts_are_named(layout: dict[str, Any], named: str, method: str) -> None:
    with pytest.raises(ValueError, match=named):
        getattr(small_memory("titans"), method)(tokens(2, 5), **layout)


def test_packed_state_needs_a_row_per_sequence() -> None:
    memory, x = small_memory("titans"), tokens(1, 5)
    _, state = memory(x, cu_seqlens=[0, 2, 5])
    with pytest.raises(ValueError, match="state has 2 rows, but the input has 3"):
        memory(x, state, cu_seqlens=[0, 1, 2, 5])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"preset": "atals"}, "preset='atals' is unknown. Nearest: atlas"),
        ({"chunk": 0}, "chunk=0 must be a whole number"),
        ({"chunks": 3}, "no field 'chunks'. Nearest: chunk"),
        ({"dim": 0}, "dim=0"),
        ({"heads": 2.5}, "heads=2.5"),
        ({"heads": True}, "heads=True"),
        ({"convolution": 0}, "convolution=0"),
        ({"initial_rank": 0}, "initial_rank=0"),
        ({"spec": MemorySpec(), "chunk": 0}, "chunk=0 must be a whole number"),
        ({"spec": MemorySpec(), "chunks": 3}, "chunks"),
        ({"spec": "atlas"}, "spec="),
    ],
)
def test_bad_construction_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Memory(**{"dim": 8, **arguments})


def test_nothing_is_computed_on_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = small_memory("titans")
    monkeypatch.setattr(memory.tokens, "forward", lambda *_: pytest.fail("computed before checking"))
    with pytest.raises(ValueError, match="NaN"):
        memory(tokens(2, 5) * torch.nan)
    with pytest.raises(ValueError, match="mask"):
        memory(tokens(2, 5), mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match="state"):
        memory(tokens(2, 5), "book.safetensors")


def test_checking_can_be_switched_off() -> None:
    memory, x = small_memory("titans"), tokens(2, 5)
    x[0, 2] = torch.nan
    y, _ = memory(x, check_finite=False)
    assert y[0].isnan().any()
    assert torch.isfinite(y[1]).all()


def test_monitors_are_filled() -> None:
    memory, x, monitors = small_memory("titans"), tokens(2, 5), Monitors()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    memory(x, mask=mask, monitors=monitors)
    assert monitors.surprise.shape == (2, 5, 2)
    assert monitors.mean_write.requires_grad
    monitors.mean_write.backward()
    assert memory.gates.projection.bias.grad.any()


@pytest.mark.parametrize("preset", ["titans", "gated_deltanet", "transformer", "deep_transformer"])
def test_monitors_of_nothing(preset: str) -> None:
    monitors = Monitors()
    small_memory(preset)(tokens(2, 0), monitors=monitors)
    assert monitors.surprise.shape == (2, 0, 2)
    assert monitors.mean_write == 0


def test_description_names_the_spec() -> None:
    assert "MemorySpec" in repr(small_memory("titans"))
