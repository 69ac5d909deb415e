"""Bad arguments of the operator: the error names the argument, and comes before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atlas_memory import MemorySpec
from atlas_memory.ops import Gates, memorize, memorize_reference
from tests.support import CHUNK, Problem, assert_close, make_problem, read, small_spec

OPERATORS = [memorize, memorize_reference]


def _arguments(problem: Problem, **changes: Any) -> dict[str, Any]:
    queries, keys, values, gates = problem.part(0)
    arguments = {"queries": queries, "keys": keys, "values": values, "gates": gates, "initial": problem.initial}
    return {"spec": problem.spec, "coefficients": problem.coefficients, **arguments, **changes}


def _gates(problem: Problem, **changes: Any) -> Gates:
    return problem.gates._replace(**changes)


def _not_finite(tensor: torch.Tensor, value: float) -> torch.Tensor:
    damaged = tensor.detach().clone()
    damaged.view(-1)[-1] = value
    return damaged


BAD: dict[str, tuple[Callable[[Problem], dict[str, Any]], str]] = {
    "keys of three dimensions": (lambda p: {"keys": p.keys[0]}, "keys must have shape"),
    "keys of another width": (lambda p: {"keys": p.keys[..., :2]}, "keys must have shape"),
    "queries of another width": (lambda p: {"queries": p.queries[..., :2]}, "queries must have shape"),
    "values of another width": (lambda p: {"values": p.values[..., :2]}, "values must have shape"),
    "fewer queries": (lambda p: {"queries": p.queries[:, :2]}, "queries has shape"),
    "fewer values": (lambda p: {"values": p.values[:1]}, "values has shape"),
    "keys as integers": (lambda p: {"keys": p.keys.long()}, "keys must be floating point"),
    "values as integers": (lambda p: {"values": p.values.long()}, "values must be floating point"),
    "queries elsewhere": (lambda p: {"queries": p.queries.to("meta")}, "queries are on meta"),
    "values elsewhere": (lambda p: {"values": p.values.to("meta")}, "values are on meta"),
    "no momentum": (lambda p: {"gates": _gates(p, momentum=None)}, "gates.momentum"),
    "gate of another shape": (lambda p: {"gates": _gates(p, step=p.gates.step[..., :1])}, "gates.step must have shape"),
    "window of another width": (
        lambda p: {"gates": _gates(p, window=p.gates.window[..., :2])},
        "gates.window must have shape",
    ),
    "gate as integers": (lambda p: {"gates": _gates(p, step=p.gates.step.long())}, "gates.step must be floating point"),
    "gate elsewhere": (lambda p: {"gates": _gates(p, retention=p.gates.retention.to("meta"))}, "gates.retention"),
    "gate as a list": (lambda p: {"gates": _gates(p, step=[1.0])}, "gates.step must be a tensor, got list"),
    "initial weights as a list": (
        lambda p: {"initial": {**p.initial, "up": [1.0]}},
        r"initial\['up'\] must be a tensor, got list",
    ),
    "initial weights as integers": (
        lambda p: {"initial": {**p.initial, "up": p.initial["up"].long()}},
        r"initial\['up'\] must be floating point",
    ),
    "keys with NaN": (lambda p: {"keys": _not_finite(p.keys, torch.nan)}, "keys holds NaN"),
    "queries with NaN": (lambda p: {"queries": _not_finite(p.queries, torch.nan)}, "queries holds NaN"),
    "infinite values": (lambda p: {"values": _not_finite(p.values, torch.inf)}, "values holds NaN or infinite"),
    "gate with NaN": (lambda p: {"gates": _gates(p, step=_not_finite(p.gates.step, torch.nan))}, "gates.step"),
    "gate above one": (lambda p: {"gates": _gates(p, step=p.gates.step + 1)}, "gates.step must lie between 0 and 1"),
    "negative gate": (lambda p: {"gates": _gates(p, window=-p.gates.window)}, "gates.window must lie between 0 and 1"),
    "initial weights with NaN": (
        lambda p: {"initial": {**p.initial, "up": _not_finite(p.initial["up"], torch.nan)}},
        r"initial\['up'\] holds NaN",
    ),
    "infinite coefficients": (
        lambda p: {"coefficients": _not_finite(p.coefficients, torch.inf)},
        "coefficients holds NaN or infinite",
    ),
    "coefficients elsewhere": (lambda p: {"coefficients": p.coefficients.to("meta")}, "coefficients are on meta"),
    "no initial weights": (lambda p: {"initial": None}, "initial must give the weights"),
    "missing layer": (lambda p: {"initial": {"up": p.initial["up"]}}, r"initial\['down'\] must have shape"),
    "layer of another shape": (
        lambda p: {"initial": {**p.initial, "up": p.initial["up"][:1]}},
        r"initial\['up'\] must have shape",
    ),
    "layer elsewhere": (lambda p: {"initial": {**p.initial, "up": p.initial["up"].to("meta")}}, r"initial\['up'\]"),
    "too few coefficients": (lambda p: {"coefficients": p.coefficients[:2]}, "coefficients must have shape"),
    "too few lengths": (lambda p: {"lengths": [3]}, "lengths="),
    "negative length": (lambda p: {"lengths": [3, -1]}, "lengths="),
    "length beyond the tokens": (lambda p: {"lengths": [3, 6]}, "lengths="),
    "lengths that are not whole": (lambda p: {"lengths": [2.5, 3.0]}, "lengths=.* must hold whole numbers"),
    "no rows": (lambda p: {"keys": p.keys[:0]}, "keys must have at least one row"),
    "keys as a list": (lambda p: {"keys": p.keys.tolist()}, "keys must be a tensor, got list"),
    "the name of a spec": (lambda p: {"spec": "titans"}, "spec must be a MemorySpec, got str"),
    "gates as a dictionary": (lambda p: {"gates": {}}, "gates must be a Gates, got dict"),
    "state as a pair": (lambda p: {"state": (1, 2)}, "state must be a MemoryState, got tuple"),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", BAD)
def test_bad_argument_is_named(name: str, operator: Callable[..., Any]) -> None:
    change, named = BAD[name]
    problem = make_problem(small_spec("atlas", window=3), count=5)
    with pytest.raises(ValueError, match=named):
        operator(**_arguments(problem, **change(problem)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_gate_that_the_spec_does_not_have(operator: Callable[..., Any]) -> None:
    problem = make_problem(small_spec("ttt"), count=3)
    gates = _gates(problem, momentum=problem.gates.step)
    with pytest.raises(ValueError, match=r"optimizer='gd' takes no gates\.momentum"):
        operator(**_arguments(problem, gates=gates))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", ["retention", "step", "window"])
def test_gate_that_the_spec_holds_constant(name: str, operator: Callable[..., Any]) -> None:
    problem = make_problem(small_spec("transformer"), count=3)
    gate = torch.rand(*problem.keys.shape[:3], *([1] if name == "window" else []), dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"gates\.{name} is given, but {name}="):
        operator(**_arguments(problem, gates=Gates(**{name: gate})))


@pytest.mark.parametrize("operator", OPERATORS)
def test_lengths_may_be_a_tensor(operator: Callable[..., Any]) -> None:
    problem = make_problem(small_spec("titans"), count=5)
    _, state = operator(**_arguments(problem), lengths=torch.tensor([3, 5]))
    assert state.position == (3, 5) and all(type(n) is int for n in state.position)


@pytest.mark.parametrize("operator", OPERATORS)
def test_state_of_more_precision(operator: Callable[..., Any]) -> None:
    problem = make_problem(small_spec("linear_attention"), count=3)
    _, state = read(memorize, problem)
    tokens = {"queries": problem.queries.float(), "keys": problem.keys.float(), "values": problem.values.float()}
    with pytest.raises(ValueError, match=r"state is torch.float64, but torch.float32 is worked in here"):
        operator(**_arguments(problem, **tokens, initial=None, state=state))
    operator(**_arguments(problem, **tokens, initial=None, state=state.to(torch.bfloat16)))  # of less


@pytest.mark.parametrize("operator", OPERATORS)
def test_coefficients_without_a_polynomial(operator: Callable[..., Any]) -> None:
    problem = make_problem(small_spec("ttt"), count=3)
    with pytest.raises(ValueError, match="coefficients are for feature='polynomial'"):
        operator(**_arguments(problem, coefficients=torch.ones(3)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_state_of_another_memory(operator: Callable[..., Any]) -> None:
    problem = make_problem(small_spec("titans"), count=3)
    _, state = read(memorize, problem)
    other = make_problem(small_spec("titans", chunk=CHUNK + 1), count=3)
    with pytest.raises(ValueError, match=r"state belongs to another memory; fields differ: .*chunk"):
        operator(**_arguments(other, state=state))
    more_rows = make_problem(problem.spec, batch=3, count=3)
    with pytest.raises(ValueError, match="state has 2 rows, but the input has 3"):
        operator(**_arguments(more_rows, state=state))
    more_heads = make_problem(problem.spec, heads=3, count=3)
    with pytest.raises(ValueError, match="state has weights"):
        operator(**_arguments(more_heads, state=state))
    with pytest.raises(ValueError, match="state is on meta"):
        operator(**_arguments(problem, state=state.to("meta")))


def test_state_of_other_gates() -> None:
    """Gates that were constants in the first call cannot appear in the second."""
    spec = small_spec("ttt")
    problem = make_problem(spec, count=3)
    _, state = memorize(**_arguments(problem, gates=Gates()))
    with pytest.raises(ValueError, match=r"state has open\.step"):
        memorize(**_arguments(problem, state=state))


def test_no_check_lets_numbers_through() -> None:
    problem = make_problem(small_spec("ttt"), count=3)
    damaged = _not_finite(problem.values, torch.nan)
    outputs, _ = memorize(**_arguments(problem, values=damaged), check_finite=False)
    assert outputs.isnan().any()


def test_matrix_memories_start_empty() -> None:
    """Without initial weights they are zero."""
    problem = make_problem(small_spec("gated_deltanet"))
    empty = problem.replace(initial={"down": torch.zeros_like(problem.initial["down"])})
    outputs, _ = memorize(**_arguments(problem, initial=None))
    assert_close(outputs, read(memorize, empty)[0])


@pytest.mark.parametrize(
    ("given", "working"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_working_precision(operator: Callable[..., Any], given: torch.dtype, working: torch.dtype) -> None:
    """Outputs and state in float32, or in float64 if the keys are."""
    problem = make_problem(small_spec("atlas"), count=5)
    gates = Gates(*(None if gate is None else gate.to(given) for gate in problem.gates))
    tokens = {name: getattr(problem, name).to(given) for name in ("queries", "keys", "values")}
    initial = {site: weight.to(given) for site, weight in problem.initial.items()}
    outputs, state = operator(**_arguments(problem, gates=gates, initial=initial, **tokens))
    assert outputs.dtype == working
    assert {tensor.dtype for tensor in state.tensors.values()} == {working}


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_tokens(operator: Callable[..., Any]) -> None:
    problem = make_problem(MemorySpec(network="mlp", key_width=3, expansion=2, chunk=CHUNK), count=0)
    outputs, state = operator(**_arguments(problem))
    assert outputs.shape == (2, 0, 2, 3)
    assert state.position == (0, 0)
