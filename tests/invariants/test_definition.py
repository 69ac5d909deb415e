"""The engine gives the numbers of the definition: outputs, final state and every gradient, for every preset."""

from __future__ import annotations

import pytest

from atlas_memory import presets
from atlas_memory.ops import memorize, memorize_reference
from tests.support import (
    CHUNK,
    assert_readings_same,
    assert_same,
    make_problem,
    read,
    small_memory,
    small_spec,
    solve,
    tokens,
)

LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 13]


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("preset", presets.names())
def test_engine_equals_reference(preset: str, count: int) -> None:
    problem = make_problem(small_spec(preset), count=count)
    assert_same(solve(memorize, problem), solve(memorize_reference, problem))


@pytest.mark.parametrize("preset", presets.names())
def test_engine_equals_reference_from_a_carried_state(preset: str) -> None:
    """Also with respect to every tensor of that state, whose rows stand at different places of their chunks."""
    first, second = make_problem(small_spec(preset), count=9), make_problem(small_spec(preset), count=6, seed=1)
    _, state = read(memorize_reference, first, lengths=[9, 6])
    options = {"state": state, "lengths": [6, 5]}
    assert_same(solve(memorize, second, **options), solve(memorize_reference, second, **options))


@pytest.mark.parametrize("preset", presets.names())
def test_recomputing_changes_no_number(preset: str) -> None:
    problem = make_problem(small_spec(preset))
    assert_same(solve(memorize, problem, recompute=True), solve(memorize, problem, recompute=False))


@pytest.mark.parametrize("preset", presets.names())
def test_layer_equals_its_reference(preset: str) -> None:
    memory, x = small_memory(preset), tokens(2, 7).requires_grad_()
    leaves = {"x": x, **dict(memory.named_parameters())}
    results = [operator(x) for operator in (memory, memory.reference)]
    assert_readings_same(*results, leaves)
