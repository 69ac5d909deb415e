"""The promise of docs/method.md §9: any finite input, any parameters, float32 or bfloat16 → everything finite."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from atlas_memory import Memory, presets
from tests.support import random_mix, small_memory

DIM, COUNT, CHUNK = 6, 200, 20


def _one_hot(generator: torch.Generator) -> Tensor:
    """Few different tokens, each many times."""
    return torch.nn.functional.one_hot(torch.randint(3, (2, COUNT), generator=generator), DIM).float()


def _spiky(generator: torch.Generator) -> Tensor:
    """Small noise, and tokens 1e12 times as large now and then."""
    noise = torch.randn(2, COUNT, DIM, generator=generator)
    spikes = torch.rand(2, COUNT, 1, generator=generator) < 0.05
    return torch.where(spikes, noise, noise * 1e-12)


def _normal(generator: torch.Generator) -> Tensor:
    return torch.randn(2, COUNT, DIM, generator=generator)


PATTERNS = {
    "noise": _normal,
    "constant": lambda generator: torch.ones(2, COUNT, DIM),
    "zero": lambda generator: torch.zeros(2, COUNT, DIM),
    "one token again and again": lambda generator: _normal(generator)[:, :1].expand(2, COUNT, DIM),
    "alternating sign": lambda generator: _normal(generator)[:, :1] * (-1.0) ** torch.arange(COUNT)[:, None],
    "spiky": _spiky,
    "few tokens": _one_hot,
    "one channel": lambda generator: _normal(generator) * torch.eye(DIM)[0],
}


def _memory(preset: str, factor: float, bias: float | None, dtype: torch.dtype, **options) -> Memory:
    """A layer with all parameters times `factor`, and all gates' biases at `bias`."""
    memory = small_memory(preset, DIM, dtype=dtype, chunk=CHUNK, **options)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.mul_(factor)
        if bias is not None and memory.gates.projection is not None:
            memory.gates.projection.bias.fill_(bias)
    return memory


def _assert_finite(memory: Memory, x: Tensor) -> None:
    """Outputs, states and gradients, of two calls with a carried state."""
    x = x.requires_grad_()
    half = COUNT // 2 + 1
    first, state = memory(x[:, :half])
    second, state = memory(x[:, half:], state)
    y = torch.cat([first, second], dim=1)
    assert torch.isfinite(y).all(), "outputs"
    for name, tensor in state.tensors.items():
        assert torch.isfinite(tensor).all(), f"state.{name}"
    for kind, loss in (("outputs", y.float().sum()), ("outputs and state", random_mix(y, state))):
        leaves = {"x": x, **dict(memory.named_parameters())}
        gradients = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            assert gradient is None or torch.isfinite(gradient).all(), f"gradient of {name}, of a loss of {kind}"


@pytest.mark.parametrize("preset", presets.names())
@settings(max_examples=12)
@given(
    pattern=st.sampled_from(sorted(PATTERNS)),
    exponent=st.integers(-30, 30),
    factor=st.sampled_from([0.0, 1.0, 30.0]),
    bias=st.sampled_from([None, -50.0, 50.0]),
    gates=st.sampled_from(["smooth", "hard"]),
    seed=st.integers(0, 2**16),
)
def test_promise(
    preset: str, pattern: str, exponent: int, factor: float, bias: float | None, gates: str, seed: int
) -> None:
    memory = _memory(preset, factor, bias, torch.float32, gates=gates)
    x = PATTERNS[pattern](torch.Generator().manual_seed(seed)) * 10.0**exponent
    _assert_finite(memory, x)


def _takes(preset: str, option: str) -> bool:
    try:
        presets.make(preset, **{option: 1.0})
    except ValueError:
        return False
    return True


SURPRISED = [
    (option, n) for option in ("write_cap", "surprise_retention") for n in presets.names() if _takes(n, option)
]


@pytest.mark.parametrize("magnitude", [1e-30, 1.0])
@pytest.mark.parametrize(("option", "preset"), SURPRISED)
def test_promise_where_surprise_counts(option: str, preset: str, magnitude: float) -> None:
    """With large parameters, and tokens that are exactly zero."""
    x = PATTERNS["noise"](torch.Generator().manual_seed(0)) * magnitude
    x[:, 2:8] = 0
    _assert_finite(_memory(preset, 100.0, None, torch.float32, **{option: 1.0}), x)


# The corners, one by one: every pattern at both ends of the range, with large parameters and all gates open.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("preset", presets.names())
def test_corners(preset: str, pattern: str, dtype: torch.dtype) -> None:
    for magnitude in (1e-30, 1e30):
        x = (PATTERNS[pattern](torch.Generator().manual_seed(0)) * magnitude).to(dtype)
        _assert_finite(_memory(preset, 30.0, 50.0, dtype), x)


def _push(memory: Memory, values: dict[str, float]) -> None:
    """Set the biases of some gates."""
    gates = memory.gates
    bias = gates.projection.bias.detach().unflatten(0, (memory.heads, -1))
    for name, part in zip(gates.names, bias.split(gates.widths, dim=-1), strict=True):
        if name in values:
            part.fill_(values[name])


@pytest.mark.parametrize("retention", [-50.0, 50.0])
@pytest.mark.parametrize("momentum", [-50.0, 50.0])
@pytest.mark.parametrize("preset", presets.names())
def test_gates_pushed_against_each_other(preset: str, momentum: float, retention: float) -> None:
    """Full steps, with all or nothing kept: one token again and again is what overshoots most."""
    memory = _memory(preset, 30.0, None, torch.float32)
    if memory.gates.projection is not None:
        _push(memory, {"retention": retention, "momentum": momentum, "step": 50.0, "window": 50.0})
    for pattern in ("one token again and again", "few tokens"):
        _assert_finite(memory, PATTERNS[pattern](torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("preset", presets.names())
def test_huge_projections(preset: str) -> None:
    """Values, unlike keys, are not normalised: what is written is bounded all the same."""
    memory = _memory(preset, 1.0, 50.0, torch.float32)
    with torch.no_grad():
        memory.tokens.weight.mul_(1e15)
    _assert_finite(memory, _normal(torch.Generator().manual_seed(0)) * 1e6)


@pytest.mark.parametrize("preset", presets.names())
def test_largest_numbers(preset: str) -> None:
    """Finite is finite: the largest float32 there is, beside the smallest."""
    x = torch.full((2, COUNT, DIM), torch.finfo(torch.float32).max)
    x[:, ::2] = torch.finfo(torch.float32).smallest_normal
    _assert_finite(_memory(preset, 1.0, None, torch.float32), x)


@pytest.mark.parametrize("preset", [name for name in presets.names() if presets[name].retracts])
def test_weights_stay_in_their_ball(preset: str) -> None:
    """Whatever is read: the root-mean-square entry of weights and momentum is bounded at every chunk end."""
    memory = _memory(preset, 30.0, 50.0, torch.float32, retraction=2.0)
    _, state = memory(PATTERNS["one token again and again"](torch.Generator().manual_seed(0)))
    for kind in ("weights", "momentum"):
        for site, tensor in state.group(kind).items():
            size = math.sqrt(float(tensor.detach().square().mean((-2, -1)).max()))
            assert size <= 2.0 * (1 + 1e-4), f"{kind}.{site}"
