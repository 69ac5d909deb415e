"""What every token decides: ranges, starting values, hard ends, and the tie between writing and forgetting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atlas_memory import Memory, MemorySpec, presets
from atlas_memory.layers.gates import TokenGates, largest_step
from atlas_memory.ops import Gates
from tests.support import CHUNK, SMALL, assert_close, small_memory, small_spec, tokens

DIM, HEADS = 6, 2


def _gates(spec: MemorySpec, bias: float | None = None) -> TokenGates:
    gates = TokenGates(spec, DIM, HEADS).double()
    if bias is not None and gates.projection is not None:
        torch.nn.init.constant_(gates.projection.bias, bias)
    return gates


@pytest.mark.parametrize("kind", ["smooth", "hard"])
@pytest.mark.parametrize("preset", presets.names())
def test_gates_are_those_of_the_spec_and_lie_between_zero_and_one(preset: str, kind: str) -> None:
    spec = small_spec(preset, gates=kind)
    gates = _gates(spec)(tokens(2, 5) * 100)
    assert (gates.retention is not None) == (spec.retention == "learned")
    assert (gates.step is not None) == (spec.step == "learned")
    assert (gates.momentum is not None) == spec.carries_momentum
    assert (gates.window is not None) == (spec.window > 1)
    for name, gate in gates._asdict().items():
        if gate is not None:
            assert gate.shape == ((2, 5, HEADS, spec.window) if name == "window" else (2, 5, HEADS))
            assert ((gate >= 0) & (gate <= 1)).all(), name


def _all_values(gates: Gates) -> Tensor:
    return torch.cat([gate.flatten() for gate in gates if gate is not None])


@pytest.mark.parametrize(("bias", "value"), [(-50.0, 0.0), (50.0, 1.0)])
def test_hard_gates_reach_their_ends(bias: float, value: float) -> None:
    """Exactly, and at finite logits; a momentum of one is shortened to the chunk, Muon's step to the interval."""
    spec = small_spec("atlas", gates="hard")
    gates = _gates(spec, bias)(tokens(2, 5))
    for name, gate in gates._asdict().items():
        end = value * {"momentum": spec.largest_momentum, "step": largest_step(spec)}.get(name, 1.0)
        assert torch.equal(gate, torch.full_like(gate, end)), name


@pytest.mark.parametrize(("bias", "moves"), [(9.0, {-1.0}), (0.0, {-1.0, 1.0}), (-9.0, set())])
def test_a_hard_gate_that_is_open_can_be_closed_and_a_shut_one_stays_shut(bias: float, moves: set[float]) -> None:
    gates = _gates(small_spec("gated_deltanet", gates="hard"), bias)
    assert gates.projection is not None
    for direction in (-1.0, 1.0):
        gates.zero_grad()
        (-direction * gates(torch.zeros(1, 1, DIM).double()).step.sum()).backward()
        moved = -gates.projection.bias.grad.unflatten(0, (HEADS, -1))[:, gates.names.index("step")]
        assert torch.equal(moved.sign(), torch.full_like(moved, direction if direction in moves else 0.0))


def test_hard_gates_reach_their_ends_near_zero_logits() -> None:
    for bias in (-3.0, 3.0):
        gates = _gates(small_spec("omeganet", gates="hard"), bias)(torch.zeros(1, 1, DIM).double())
        assert set(_all_values(gates).tolist()) == {float(bias > 0)}


def test_smooth_gates_never_reach_their_ends() -> None:
    """Within what a logit can say: closed is small, not zero."""
    values = _all_values(_gates(small_spec("omeganet", gates="smooth"), -15.0)(torch.zeros(1, 1, DIM).double()))
    assert (values > 0).all()


@pytest.mark.parametrize("kind", ["smooth", "hard"])
def test_gates_have_a_slope_inside(kind: str) -> None:
    gates = _gates(small_spec("atlas", gates=kind), 0.3)
    _all_values(gates(tokens(2, 5))).sum().backward()
    assert gates.projection.weight.grad.any(dim=-1).all()
    assert gates.projection.bias.grad.bool().all()


@pytest.mark.parametrize("kind", ["smooth", "hard"])
@pytest.mark.parametrize("preset", presets.names())
def test_gates_start_open_enough_to_learn(preset: str, kind: str) -> None:
    """Memories keep what they read, and steps are neither full nor empty."""
    gates = _gates(small_spec(preset, gates=kind))(torch.zeros(1, 1, DIM).double())
    if gates.retention is not None:
        assert (gates.retention > 0.999).all()
        assert (gates.retention < 1).all()
        assert len(set(gates.retention.flatten().tolist())) == HEADS  # heads start with different memories
    if gates.step is not None:
        assert ((gates.step > 0.001) & (gates.step < 0.999)).all()
    if gates.window is not None:
        assert (gates.window[..., 0] > gates.window[..., 1]).all()


@pytest.mark.parametrize("preset", presets.names())
def test_hard_gates_do_not_start_shut(preset: str) -> None:
    """What is shut has no gradient: of gates that start near zero, many would never open."""
    torch.manual_seed(0)
    memory = Memory(96, heads=2, preset=preset, gates="hard", key_width=8, interval=64)
    gates = memory.gates(torch.nn.functional.rms_norm(torch.randn(1, 2000, 96), (96,)))
    for name in ("step", "window"):
        gate = getattr(gates, name)
        assert gate is None or (gate == 0).float().mean() < 0.001, name


def test_gates_depend_on_their_own_token_only() -> None:
    gates, x = _gates(small_spec("atlas")), tokens(2, 5)
    for gate, part in zip(gates(x), gates(x[:, 3:4]), strict=True):
        assert_close(gate[:, 3:4], part)


def test_tied_retention_forgets_in_proportion_to_what_is_written() -> None:
    fields = {"gates": "hard"}
    tied, free = _gates(small_spec("omeganet", tie_retention=True, **fields)), _gates(small_spec("omeganet", **fields))
    torch.nn.init.normal_(free.projection.weight)
    torch.nn.init.zeros_(free.projection.bias)
    tied.load_state_dict(free.state_dict())
    x = tokens(4, 50) * 2
    alpha, expected = tied(x), free(x)
    assert_close(alpha.retention, 1 - expected.step * (1 - expected.retention))
    silent = alpha.step == 0
    assert silent.any()
    assert torch.equal(alpha.retention[silent], torch.ones_like(alpha.retention[silent]))
    written = (alpha.step > 0) & (expected.retention < 1)
    assert (alpha.retention[written] < 1).all()


# Background text leaves no trace: facts are tokens whose first channel is 1, background those whose first is −1.


def _selective(preset: str, **options: Any) -> Memory:
    """A layer without convolution that writes facts, and nothing else."""
    memory = small_memory(preset, gates="hard", tie_retention=True, convolution=1, **options)
    projection, gates = memory.gates.projection, memory.gates
    with torch.no_grad():
        weight = projection.weight.unflatten(0, (HEADS, -1))
        bias = projection.bias.unflatten(0, (HEADS, -1))
        for name, rows, offsets in zip(
            gates.names, weight.split(gates.widths, dim=1), bias.split(gates.widths, dim=1), strict=True
        ):
            if name == "step":
                rows.zero_()
                rows[..., 0] = 50
                offsets.zero_()
    return memory


def _text(count: int, fact: bool, seed: int) -> Tensor:
    x = tokens(2, count, seed=seed)
    x[..., 0] = 1 if fact else -1
    return x


TIED = [name for name in presets.names() if presets[name].retention == "learned" and presets[name].step == "learned"]


@pytest.mark.parametrize("preset", [name for name in TIED if presets[name].optimizer != "momentum"])
def test_background_leaves_no_trace(preset: str) -> None:
    """Bit for bit, after facts were written; a momentum would carry their last step into the background."""
    memory = _selective(preset)
    _, fresh = memory(_text(1, fact=True, seed=3)[:, :0])
    _, state = memory(_text(2 * CHUNK, fact=True, seed=0))
    _, after = memory(_text(5 * CHUNK, fact=False, seed=1), state)
    for site, weight in state.group("weights").items():
        assert torch.equal(after.group("weights")[site], weight), site
    assert any(not torch.equal(state.group("weights")[s], w) for s, w in fresh.group("weights").items())


@pytest.mark.parametrize("preset", TIED)
def test_background_alone_leaves_a_memory_as_it_started(preset: str) -> None:
    memory = _selective(preset)
    _, fresh = memory(_text(1, fact=False, seed=3)[:, :0])
    _, after = memory(_text(5 * CHUNK, fact=False, seed=1))
    for site, weight in fresh.group("weights").items():
        assert torch.equal(after.group("weights")[site], weight), site


def test_spec_without_gates_has_no_parameters() -> None:
    gates = TokenGates(MemorySpec(**SMALL, retention="one", step="one"), DIM, HEADS)
    assert list(gates.parameters()) == []
    assert gates(tokens(2, 5)) == Gates()


@pytest.mark.parametrize("kind", ["smooth", "hard"])
def test_muon_takes_steps_of_one_size_whatever_the_interval(kind: str) -> None:
    """Their sum over an interval starts near one, and is two at most."""
    for interval in (16, 64):
        spec = presets.make("atlas", gates=kind, interval=interval, chunk=64)
        gates, open_ones = TokenGates(spec, DIM, HEADS), TokenGates(spec, DIM, HEADS)
        assert gates.projection is not None and open_ones.projection is not None
        torch.nn.init.zeros_(gates.projection.weight)
        torch.nn.init.constant_(open_ones.projection.bias, 50.0)
        started, largest = (made(tokens(1, 1, DIM).float()).step for made in (gates, open_ones))
        assert started is not None and largest is not None
        assert interval * started.max().item() == pytest.approx(1)
        assert interval * largest.max().item() == pytest.approx(2)
