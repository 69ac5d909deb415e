"""Reading without writing: what the last token's query would have read."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from atlas_memory import MemorySpec, presets
from atlas_memory.ops import memorize, recall
from tests.strategies import readings, specs
from tests.support import CHUNK, Problem, assert_close, assert_states_identical, make_problem, read, small_spec


def _last(x: Tensor, lengths: list[int]) -> Tensor:
    """The last real token of every row that has one (rows, 1, ...)."""
    return torch.stack([x[row, n - 1 : n] for row, n in enumerate(lengths) if n])


def _check(problem: Problem, lengths: list[int]) -> None:
    outputs, state = read(memorize, problem, lengths=lengths)
    rows = [row for row, n in enumerate(lengths) if n]
    queries = _last(problem.queries, lengths)
    answers = recall(problem.spec, queries, state.select(rows), coefficients=problem.coefficients)
    assert_close(answers, _last(outputs, lengths), "answers")


@pytest.mark.parametrize("count", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 2])
@pytest.mark.parametrize("preset", presets.names())
def test_recall_is_what_the_last_query_read(preset: str, count: int) -> None:
    _check(make_problem(small_spec(preset), count=count), [count, count])


@pytest.mark.parametrize("preset", presets.names())
def test_rows_at_different_places(preset: str) -> None:
    _check(make_problem(small_spec(preset), batch=4, count=10), [10, 8, 3, 5])


def test_rows_at_different_places_of_the_update_schedule() -> None:
    """Muon's interval does not divide the chunk: rows in their second and third chunk update at different places."""
    spec = small_spec("atlas", chunk=4, interval=3)
    _check(make_problem(spec, batch=3, count=11), [11, 7, 3])


@settings(max_examples=60)
@given(spec=specs(), reading=readings(), seed=st.integers(0, 2**16))
def test_any_spec(spec: MemorySpec, reading: dict[str, Any], seed: int) -> None:
    spec = spec.replace(retraction=None)  # which comes between a chunk's last answer and the state
    count = reading["count"]
    lengths = reading["lengths"] or [count, count]
    if any(lengths):
        _check(make_problem(spec, count=count, seed=seed), lengths)


@pytest.mark.parametrize("preset", presets.names())
def test_recall_of_many_queries_changes_nothing(preset: str) -> None:
    """Each query is answered as if it were alone, and the state stays as it was."""
    problem = make_problem(small_spec(preset), count=6)
    _, state = read(memorize, problem)
    before = state.clone()
    options = {"coefficients": problem.coefficients}
    together = recall(problem.spec, problem.queries, state, **options)
    alone = [recall(problem.spec, problem.queries[:, t : t + 1], state, **options) for t in range(6)]
    assert_close(together, torch.cat(alone, dim=1), "answers")
    assert_states_identical(state, before)


@pytest.mark.parametrize("preset", presets.names())
def test_a_fresh_memory_answers_from_its_initial_weights(preset: str) -> None:
    """Rows without a token: the state of a call of length 0."""
    problem, lengths = make_problem(small_spec(preset), count=CHUNK + 1), [0, CHUNK + 1]
    _, state = read(memorize, problem, lengths=lengths)
    alone = recall(problem.spec, problem.queries[:1], state.select([0]), coefficients=problem.coefficients)
    both = recall(problem.spec, problem.queries, state, coefficients=problem.coefficients)
    assert_close(both[:1], alone, "answers")
    other = problem.replace(values=problem.values.detach() + 1)
    _, other_state = read(memorize, other, lengths=lengths)
    others = recall(problem.spec, problem.queries, other_state, coefficients=problem.coefficients)
    assert torch.equal(others[0], both[0])
    assert not torch.allclose(others[1], both[1])


def test_gradients_reach_queries_and_state() -> None:
    problem = make_problem(small_spec("titans"), count=6)
    _, state = read(memorize, problem)
    state = state.map(lambda tensor: tensor.detach().requires_grad_())
    recall(problem.spec, problem.queries, state).sum().backward()
    assert problem.queries.grad.abs().sum() > 0
    for name in ("weights.up", "weights.down", "momentum.up", "momentum.down", "open.keys", "open.values", "open.step"):
        assert state.tensors[name].grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("queries", "named"),
    [
        (torch.zeros(2, 1, 2, 4), "queries must have shape"),
        (torch.zeros(2, 2, 3), "queries must have shape"),
        (torch.zeros(3, 1, 2, 3), "state has 2 rows, but the input has 3"),
        (torch.zeros(2, 1, 3, 3), "state is torch.float64, but torch.float32 is worked in here"),
        (torch.full((2, 1, 2, 3), torch.nan), "queries holds NaN"),
        (torch.zeros(2, 1, 2, 3, dtype=torch.long), "queries must be floating point"),
    ],
)
def test_bad_queries_are_named(queries: Tensor, named: str) -> None:
    problem = make_problem(small_spec("titans"), count=2)
    _, state = read(memorize, problem)
    with pytest.raises(ValueError, match=named):
        recall(problem.spec, queries, state)


def test_state_on_another_device_is_named() -> None:
    problem = make_problem(small_spec("titans"), count=2)
    _, state = read(memorize, problem)
    with pytest.raises(ValueError, match="state is on meta, the input on cpu"):
        recall(problem.spec, problem.queries, state.to("meta"))
