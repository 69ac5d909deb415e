"""The engine on every axis of the spec; every preset is compared with the definition in tests/invariants."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from atlas_memory import MemorySpec
from atlas_memory.ops import Gates, Monitors, engine, memorize, memorize_reference, newton_schulz, sites
from tests.strategies import readings, specs
from tests.support import SMALL, Problem, assert_close, assert_same, assert_states_close, make_problem, read, solve

BASES: dict[str, dict[str, Any]] = {
    "exact matrix": {"network": "matrix"},
    "anchored matrix": {"network": "matrix", "write_cap": 100.0},
    "mlp with momentum": {"network": "mlp", "optimizer": "momentum"},
    "gated mlp with Muon": {"network": "gated_mlp", "feature": "polynomial", "optimizer": "muon", "window": 2},
}
AXES: list[dict[str, Any]] = [
    *({"window": width} for width in (1, 3, SMALL["chunk"] + 3)),
    *({"optimizer": name} for name in ("gd", "momentum")),
    *({"optimizer": "muon", "interval": r} for r in (1, 2, 3, SMALL["chunk"], SMALL["chunk"] + 3)),
    *({"optimizer": "muon", "newton_schulz_steps": steps} for steps in (1, 7)),
    *({"objective": name} for name in ("regression", "dot")),
    *({"gradient_at": name} for name in ("state", "decayed")),
    *({"limiter": on} for on in (True, False)),
    *({"retraction": bound} for bound in (None, 0.3, 100.0)),
    {"retraction": 0.3, "optimizer": "momentum"},
    {"retraction": 0.3, "optimizer": "gd", "objective": "dot"},
    *({"surprise_retention": scale} for scale in (0.1, 2.0)),
    *({"write_cap": bound} for bound in (0.5, 50.0)),
    *({"feature": "polynomial", "degree": degree} for degree in (1, 2, 3)),
    *({"chunk": size} for size in (1, 3, 64)),
    {"retention": "one"},
    {"step": "one"},
    {"retention": "one", "step": "one"},
]
DEEP_AXES: list[dict[str, Any]] = [
    *({"network": "mlp", "fast": fast} for fast in (("up",), ("down",))),
    *({"network": "gated_mlp", "fast": fast} for fast in (("gate",), ("up",), ("down",), ("down", "gate"))),
    {"activation": "identity"},
    {"residual": False, "value_width": 5},
]
DEEP_BASES = [name for name in BASES if "matrix" not in name]


def _described(overrides: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in overrides.items())


def _compare(spec: MemorySpec) -> None:
    """Ragged rows in two calls; then on from there, the rows now at different places of every schedule."""
    first, second = make_problem(spec, count=7), make_problem(spec, count=6, seed=1)
    expected = solve(memorize_reference, first, lengths=[7, 5])
    assert_same(solve(memorize, first, splits=[2], lengths=[7, 5]), expected)
    onward = {"lengths": [6, 4], "state": expected.state}
    assert_same(solve(memorize, second, splits=[4], **onward), solve(memorize_reference, second, **onward))


@pytest.mark.parametrize("axis", AXES, ids=_described)
@pytest.mark.parametrize("base", BASES)
def test_axis(base: str, axis: dict[str, Any]) -> None:
    _compare(MemorySpec(**{**SMALL, **BASES[base], **axis}))


@pytest.mark.parametrize("axis", DEEP_AXES, ids=_described)
@pytest.mark.parametrize("base", DEEP_BASES)
def test_axis_of_deep_memories(base: str, axis: dict[str, Any]) -> None:
    _compare(MemorySpec(**{**SMALL, **BASES[base], **axis}))


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("base", BASES)
def test_calls_inside_one_chunk(base: str, interval: int) -> None:
    """As in decoding: earlier tokens of the chunk are seen again, and must not be answered again."""
    spec = MemorySpec(**{**SMALL, **BASES[base], "chunk": 8, "interval": interval})
    problem = make_problem(spec, count=8)
    assert_same(solve(memorize, problem, splits=[3, 6, 7]), solve(memorize_reference, problem))


@pytest.mark.parametrize(("window", "chunk"), [(20, 8), (1, 96)])
def test_exact_momentum_goes_on_in_mid_chunk(window: int, chunk: int) -> None:
    """Less than a chunk is taken at once, and the rest of the chunk is no multiple of that."""
    spec = MemorySpec(network="matrix", optimizer="momentum", key_width=3, window=window, chunk=chunk)
    problem = make_problem(spec, count=chunk + 11, batch=1, heads=1)
    watched, expected_watched = Monitors(), Monitors()
    assert_same(
        solve(memorize, problem, splits=[chunk - 3], monitors=watched),
        solve(memorize_reference, problem),
    )
    read(memorize, problem, monitors=expected_watched)
    assert_close(watched.surprise, expected_watched.surprise[:, chunk - 3 :], "surprise")


EXPLODED = 1e5


def _compare_reading(spec: MemorySpec, reading: dict[str, Any], seed: int) -> None:
    problem, options = make_problem(spec, count=reading["count"], seed=seed), {"lengths": reading["lengths"]}
    if reading["before"] is not None:
        earlier = make_problem(spec, count=7, seed=seed + 1)
        options["state"] = read(memorize_reference, earlier, lengths=reading["before"])[1]
    expected = solve(memorize_reference, problem, **options)
    # Without guards some memories are chaotic: the rounding errors of either side grow along with the gradients.
    assume(torch.cat([gradient.flatten() for gradient in expected.gradients.values()]).abs().max() < EXPLODED)
    assert_same(solve(memorize, problem, splits=reading["splits"], **options), expected)


@settings(max_examples=300)
@given(spec=specs(), reading=readings(), seed=st.integers(0, 2**16))
def test_any_spec_any_reading(spec: MemorySpec, reading: dict[str, Any], seed: int) -> None:
    _compare_reading(spec, reading, seed)


@pytest.mark.slow
@settings(max_examples=3000)
@given(spec=specs(), reading=readings(), seed=st.integers(0, 2**16))
def test_any_spec_any_reading_at_length(spec: MemorySpec, reading: dict[str, Any], seed: int) -> None:
    _compare_reading(spec, reading, seed)


def _with_gate(problem: Problem, name: str, value: float) -> Problem:
    gate = torch.full_like(getattr(problem.gates, name), value).requires_grad_()
    return problem.replace(gates=problem.gates._replace(**{name: gate}))


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("name", Gates._fields)
@pytest.mark.parametrize("base", BASES)
def test_gates_at_their_ends(base: str, name: str, value: float) -> None:
    """Decays of exactly 0 must neither divide by zero nor lose gradients."""
    problem = make_problem(MemorySpec(**{**SMALL, **BASES[base], "window": 3}), count=9)
    if getattr(problem.gates, name) is None:
        problem = make_problem(MemorySpec(**{**SMALL, **BASES[base], "window": 3, "optimizer": "momentum"}), count=9)
    problem = _with_gate(problem, name, value)
    assert_same(solve(memorize, problem), solve(memorize_reference, problem))


def test_long_call_is_worked_on_in_pieces() -> None:
    """More chunks than the engine holds at once."""
    problem = make_problem(MemorySpec(network="mlp", key_width=2, expansion=1, chunk=1), count=150, batch=1, heads=1)
    assert_same(solve(memorize, problem), solve(memorize_reference, problem))


IDLE_AXES: list[dict[str, Any]] = [
    {"network": "matrix"},
    {"network": "matrix", "objective": "dot"},
    {"network": "matrix", "window": 3},
    {"network": "matrix", "feature": "polynomial"},
    {"network": "matrix", "retention": "one"},
    {"network": "matrix", "optimizer": "momentum"},  # which goes on moving the weights where nothing is written
    {"network": "mlp", "optimizer": "gd"},
    {"network": "mlp", "optimizer": "muon", "interval": 2, "window": 3},  # whose momentum goes on gathering
]


def _still(problem: Problem, begin: int, end: int) -> Problem:
    """Nothing is written and nothing forgotten at these tokens."""

    def ended(gate: torch.Tensor | None, value: float) -> torch.Tensor | None:
        if gate is None:
            return None
        gate = gate.detach().clone()
        gate[:, begin:end] = value
        return gate

    gates = problem.gates._replace(step=ended(problem.gates.step, 0), retention=ended(problem.gates.retention, 1))
    return problem.replace(gates=gates)


@pytest.mark.parametrize("axis", IDLE_AXES, ids=_described)
@pytest.mark.parametrize("splits", [[], [5, 6, 17]])
def test_chunks_that_change_nothing(axis: dict[str, Any], splits: list[int]) -> None:
    problem = make_problem(MemorySpec(**{**SMALL, "optimizer": "gd", **axis}), count=26)
    problem = _still(_still(problem, 4, 15), 20, 26)
    with torch.no_grad():
        outputs, state = read(memorize, problem, splits=splits)
        expected, expected_state = read(memorize_reference, problem)
    assert_close(outputs, expected, "outputs")
    assert_states_close(state, expected_state)


def test_only_the_other_chunks_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(model: Any, chunks: Any, size: int) -> Any:
        sizes.append(len(chunks.keys))
        return prepare(model, chunks, size)

    prepare = engine.prepare_chunks
    monkeypatch.setattr(engine, "prepare_chunks", counted)
    problem = _still(make_problem(MemorySpec(**{**SMALL, "network": "matrix", "optimizer": "gd"}), count=24), 4, 15)
    with torch.no_grad():
        read(memorize, problem)
    read(memorize, problem)  # a gate that is zero has a gradient
    read(memorize, _still(problem, 0, 24))
    with torch.no_grad():
        read(memorize, _still(problem, 0, 24))
    assert sizes == [4, 6, 6, 0]


def test_steps_that_are_not_taken_are_not_orthogonalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six chunks of two update points and two layers, those of the second and third take none."""
    counted: list[int] = []

    def counting(*arguments: Any) -> torch.Tensor:
        counted.append(1)
        return newton_schulz(*arguments)

    monkeypatch.setattr(sites, "newton_schulz", counting)
    spec = MemorySpec(**{**SMALL, "network": "mlp", "optimizer": "muon", "interval": 2})
    problem = _still(make_problem(spec, count=24), 4, 12)
    with torch.no_grad():
        read(memorize, problem)
    assert len(counted) == 2 * 4
    counted.clear()
    read(memorize, problem)  # a gate that is zero has a gradient
    assert len(counted) == 2 * 6
