"""Nothing but the numbers that go in decides the numbers that come out; and all of them learn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from atlas_memory import presets
from tests.support import CHUNK, assert_states_identical, random_mix, small_memory, tokens

COUNT = 3 * CHUNK + 2
MODES: dict[str, tuple[bool, Callable[[], AbstractContextManager]]] = {
    "eval": (False, nullcontext),
    "no_grad": (True, torch.no_grad),
    "inference_mode": (True, torch.inference_mode),
    "eval and inference_mode": (False, torch.inference_mode),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", presets.names())
def test_same_numbers_in_every_mode(preset: str, mode: str) -> None:
    """Bit for bit, in a first call and in one that goes on from its state."""
    training, context = MODES[mode]
    memory, x, more = small_memory(preset), tokens(2, COUNT), tokens(2, COUNT, seed=1)
    memory.train()
    expected, state = memory(x)
    expected_more, expected_state = memory(more, state)
    memory.train(training)
    with context():
        y, state = memory(x)
        y_more, state = memory(more, state)
    assert torch.equal(y, expected)
    assert torch.equal(y_more, expected_more)
    assert_states_identical(state, expected_state)


@pytest.mark.parametrize("preset", presets.names())
def test_states_of_inference_mode_can_be_trained_from(preset: str) -> None:
    memory, x = small_memory(preset), tokens(2, COUNT)
    with torch.inference_mode():
        _, state = memory(x)
    y, _ = memory(x, state.clone())
    y.sum().backward()
    assert memory.output.weight.grad is not None


@pytest.mark.parametrize("gates", ["smooth", "hard"])
@pytest.mark.parametrize("preset", presets.names())
def test_every_parameter_learns(preset: str, gates: str) -> None:
    """A finite gradient that is not zero; of every single gate, so that none is dead."""
    memory = small_memory(preset, gates=gates)
    _read_with_open_gates(memory).square().sum().backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name
    if memory.gates.projection is not None:
        assert memory.gates.projection.bias.grad.bool().all()


def _read_with_open_gates(memory) -> torch.Tensor:
    """Answers with all gates near one half: at their ends, hard ones have no slope."""
    if memory.gates.projection is not None:
        with torch.no_grad():
            memory.gates.projection.bias.zero_()
    return memory(tokens(2, COUNT))[0]


@pytest.mark.parametrize("preset", presets.names())
def test_gradients_flow_through_the_state(preset: str) -> None:
    """What the second call answers depends on the first call's input and on all parameters behind it."""
    memory, x = small_memory(preset), tokens(2, COUNT).requires_grad_()
    _, state = memory(x)
    y, _ = memory(tokens(2, COUNT, seed=1), state)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert gradient.any(dim=-1).all()


@pytest.mark.parametrize("preset", presets.names())
def test_same_call_same_numbers(preset: str) -> None:
    memory, x = small_memory(preset, dtype=torch.float32), tokens(2, COUNT, dtype=torch.float32)
    (y, state), (again, again_state) = memory(x), memory(x)
    assert torch.equal(y, again)
    assert_states_identical(state, again_state)


@pytest.mark.parametrize("preset", presets.names())
def test_forward_hides_no_state(preset: str) -> None:
    """No buffers, and no parameter is changed by reading."""
    memory = small_memory(preset)
    before = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    random_mix(*memory(tokens(2, COUNT))).backward()
    assert not list(memory.buffers())
    after = memory.state_dict()
    assert sorted(after) == sorted(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("preset", presets.names())
def test_autocast(preset: str) -> None:
    """Projections run in the low precision, the memory itself does not: states stay in float32."""
    memory, x = small_memory(preset, dtype=torch.float32), tokens(2, COUNT, dtype=torch.float32)
    exact, _ = memory(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = memory(x)
        more, state = memory(x, state)
    assert y.dtype == torch.bfloat16
    for name, tensor in state.tensors.items():
        assert tensor.dtype == torch.float32, name
        assert torch.isfinite(tensor).all(), name
    assert torch.isfinite(more).all()
    assert (y.float() - exact).norm() < 0.2 * exact.norm()
    random_mix(y, state).backward()
    for name, parameter in memory.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("preset", presets.names())
def test_low_precision_layer(preset: str) -> None:
    """Parameters and inputs in bfloat16: the answer too, the state in float32."""
    memory = small_memory(preset, dtype=torch.bfloat16)
    y, state = memory(tokens(2, COUNT, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in state.tensors.values()} == {torch.float32}
    more, _ = memory(tokens(2, COUNT, seed=1, dtype=torch.bfloat16), state)
    assert torch.isfinite(more).all()
