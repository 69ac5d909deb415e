"""torch.compile of the operator as one graph: the same numbers and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from atlas_memory import presets
from atlas_memory.ops import memorize
from tests.support import (
    CHUNK,
    Operator,
    assert_close,
    assert_same,
    assert_states_close,
    make_problem,
    read,
    small_spec,
    solve,
)

# The compiler makes an object of every autograd function that it traces, which torch itself warns about.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

# one of each kind of update: exact dot, exact regression, linear in chunks, Muon
KINDS = ["linear_attention", "gated_deltanet", "titans", "atlas"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _compiled(backend: str) -> Operator:
    return torch.compile(memorize, fullgraph=True, backend=backend)


def _check_first_call(preset: str, backend: str) -> None:
    problem = make_problem(small_spec(preset), count=CHUNK + 2)
    assert_same(solve(_compiled(backend), problem), solve(memorize, problem))


def _check_carried_state(preset: str, backend: str) -> None:
    """From the middle of one chunk to the middle of another."""
    spec = small_spec(preset)
    _, state = read(memorize, make_problem(spec, count=CHUNK - 1))
    problem = make_problem(spec, count=CHUNK, seed=1)
    assert_same(solve(_compiled(backend), problem, state=state), solve(memorize, problem, state=state))


@pytest.mark.parametrize("preset", KINDS)
def test_first_call(preset: str) -> None:
    _check_first_call(preset, "aot_eager")


@pytest.mark.parametrize("preset", ["gated_deltanet", "titans"])
def test_carried_state(preset: str) -> None:
    _check_carried_state(preset, "aot_eager")


def test_calls_of_another_length() -> None:
    """The compiler then tries to make lengths and positions symbols."""
    compiled = _compiled("aot_eager")
    spec = small_spec("gated_deltanet")
    for count in (CHUNK, CHUNK + 1, 2 * CHUNK + 1):
        problem = make_problem(spec, count=count)
        assert_same(solve(compiled, problem), solve(memorize, problem))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("preset", ["gated_deltanet", "titans"])
def test_without_gradients(preset: str, mode: Callable[[], Any]) -> None:
    problem = make_problem(small_spec(preset), count=CHUNK + 2)
    with mode():
        (y, state), (expected, expected_state) = read(_compiled("aot_eager"), problem), read(memorize, problem)
    assert_close(y, expected)
    assert_states_close(state, expected_state)


@pytest.mark.parametrize("preset", ["gated_deltanet", "titans"])
def test_token_by_token(preset: str) -> None:
    """After the first few, the compiler counts positions in symbols."""
    problem = make_problem(small_spec(preset), count=CHUNK + 2)
    with torch.no_grad():
        y, state = read(_compiled("eager"), problem, list(range(1, problem.count)))
    expected, expected_state = read(memorize, problem)
    assert_close(y, expected)
    assert_states_close(state, expected_state)


@pytest.mark.slow
@pytest.mark.parametrize("check", [_check_first_call, _check_carried_state])
@pytest.mark.parametrize("preset", presets.names())
def test_inductor(preset: str, check: Callable[[str, str], None]) -> None:
    check(preset, "inductor")
