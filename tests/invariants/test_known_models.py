"""Corners of the family that others have written down: each equals an implementation that shares no code with ours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from atlas_memory import MemorySpec, MemoryState, presets
from atlas_memory.ops import Gates, memorize, memorize_reference
from tests.support import (
    SMALL,
    Problem,
    assert_close,
    assert_states_close,
    gradients_of,
    make_problem,
    random_mix,
    read,
    small_spec,
)

# transformers works in float32, whatever it is given.
SINGLE = 1e-5


def _delta_rule(problem: Problem) -> tuple[Tensor, Tensor]:
    """The rule of transformers: outputs (B, T, H, V) and weights (B, H, V, D)."""
    retention = torch.ones_like(problem.gates.step) if problem.gates.retention is None else problem.gates.retention
    outputs, state = torch_recurrent_gated_delta_rule(
        problem.queries * math.sqrt(problem.spec.key_width),  # it scales queries by 1/√d, we do not
        problem.keys,
        problem.values,
        g=retention.log(),
        beta=problem.gates.step,
        initial_state=problem.initial["down"].mT.expand(problem.batch, -1, -1, -1),
        output_final_state=True,
    )
    return outputs, state.mT


@pytest.mark.parametrize("operator", [memorize, memorize_reference])
@pytest.mark.parametrize("preset", ["deltanet", "gated_deltanet"])
def test_delta_rules_equal_those_of_transformers(preset: str, operator) -> None:
    """Outputs, final state and every gradient. Keys longer than one would call in the write limiter, which it lacks."""
    spec = presets.make(preset, key_width=8, value_width=6, chunk=8, limiter=False)
    problem = make_problem(spec, count=37).with_gates_inside()
    weights = torch.randn(problem.values.shape)
    outputs, state = read(operator, problem)
    expected, expected_weights = _delta_rule(problem)
    _assert_close_in_single_precision(outputs, expected, "outputs")
    _assert_close_in_single_precision(state.tensors["weights.down"], expected_weights, "weights")
    leaves = problem.leaves()
    gradients = [torch.autograd.grad((y * weights).sum(), list(leaves.values())) for y in (outputs, expected)]
    for name, ours, theirs in zip(leaves, *gradients, strict=True):
        _assert_close_in_single_precision(ours, theirs, f"gradient of {name}")


def _assert_close_in_single_precision(actual: Tensor, expected: Tensor, name: str) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < SINGLE, f"{name}: off by {float(error):.1e} of the largest entry"


@pytest.mark.parametrize("preset", ["deltanet", "gated_deltanet"])
def test_limiter_leaves_the_delta_rule_of_unit_keys_alone(preset: str) -> None:
    problem = make_problem(small_spec(preset))
    problem = problem.replace(keys=torch.nn.functional.normalize(problem.keys.detach(), dim=-1).requires_grad_())
    free = problem.replace(spec=small_spec(preset, limiter=False))
    limited, unlimited = read(memorize, problem), read(memorize, free)
    assert_close(limited[0], unlimited[0], "outputs")


def test_linear_attention_equals_its_closed_form() -> None:
    problem = make_problem(presets.make("linear_attention", key_width=5, value_width=4, chunk=4), count=23)
    causal = torch.ones(23, 23, dtype=torch.float64).tril()
    attention = torch.einsum("bthd,bihd->bhti", problem.queries, problem.keys) * causal
    expected = torch.einsum("bhti,bihv->bthv", attention, problem.values)
    empty = problem.replace(initial={"down": torch.zeros_like(problem.initial["down"])})
    assert_close(read(memorize, empty)[0], expected, "outputs")


def test_sliding_window_linear_attention_equals_its_closed_form() -> None:
    """swla: y_t = Σ_i P_ti v_i κ(k_i, q_t), each token written again by every window it is in, decayed since."""
    spec = presets.make("swla", key_width=3, chunk=4, window=3, degree=2)
    problem = make_problem(spec, count=10)
    alpha, eta, gamma = problem.gates.retention, problem.gates.step, problem.gates.window
    kernel = _kernel(problem.coefficients, torch.einsum("bthd,bihd->bthi", problem.queries, problem.keys))
    expected = torch.zeros_like(problem.values)
    for t in range(10):
        for s in range(t + 1):
            decay = alpha[:, s + 1 : t + 1].prod(1)
            for i in range(max(s - 2, 0), s + 1):
                weight = decay * eta[:, s] * gamma[:, s, :, s - i] * kernel[:, t, :, i]
                expected[:, t] = expected[:, t] + weight[..., None] * problem.values[:, i]
    empty = problem.replace(initial={"down": torch.zeros_like(problem.initial["down"])})
    assert_close(read(memorize, empty)[0], expected, "outputs")


def _kernel(coefficients: Tensor, products: Tensor) -> Tensor:
    return sum(c.square() * products**i for i, c in enumerate(coefficients))


@pytest.mark.parametrize("network", ["matrix", "mlp"])
def test_momentum_of_zero_is_gradient_descent(network: str) -> None:
    plain = make_problem(MemorySpec(**SMALL, network=network, window=3))
    zero = torch.zeros_like(plain.gates.step)
    heavy = plain.replace(spec=plain.spec.replace(optimizer="momentum"), gates=plain.gates._replace(momentum=zero))
    (outputs, state), (expected, expected_state) = read(memorize, heavy), read(memorize, plain)
    shared = MemoryState(plain.spec, {name: state.tensors[name] for name in expected_state.tensors}, state.position)
    assert_close(outputs, expected, "outputs")
    assert_states_close(shared, expected_state)
    gradients = gradients_of(random_mix(outputs, shared), plain.leaves())
    for name, gradient in gradients_of(random_mix(expected, expected_state), plain.leaves()).items():
        assert_close(gradients[name], gradient, f"gradient of {name}")


@pytest.mark.parametrize("preset", [name for name in presets.names() if presets[name].exact])
def test_chunk_is_a_speed_knob_of_exact_memories(preset: str) -> None:
    results = []
    for chunk in (1, 4, 7):
        problem = make_problem(small_spec(preset, chunk=chunk), count=17)
        outputs, state = read(memorize, problem)
        results.append((outputs, state.tensors["weights.down"]))
    for outputs, weights in results[1:]:
        assert_close(outputs, results[0][0], "outputs")
        assert_close(weights, results[0][1], "weights")


def test_muon_with_many_steps_moves_along_the_polar_factor() -> None:
    """One update of a matrix memory from zero momentum: W ← αW − η̄ U Vᵀ of the chunk's summed gradients."""
    widths = {"network": "matrix", "key_width": 4, "value_width": 3, "chunk": 6}
    spec = MemorySpec(optimizer="muon", newton_schulz_steps=40, limiter=False, retraction=None, **widths)
    problem = make_problem(spec, count=6, batch=1, heads=1).with_gates_inside()
    q, k, v = (x[0, :, 0] for x in problem.part(0)[:3])
    alpha, theta, eta = (gate[0, :, 0] for gate in problem.gates[:3])
    anchor, momentum, gathered = problem.initial["down"][0], torch.zeros(3, 4, dtype=torch.float64), 0.0
    for t in range(6):
        momentum = theta[t] * momentum + torch.outer(anchor @ k[t] - v[t], k[t])
        gathered = alpha[t] * gathered + eta[t]
    left, _, right = torch.linalg.svd(momentum, full_matrices=False)
    expected = alpha.prod() * anchor - gathered * left @ right
    outputs, state = read(memorize, problem)
    assert_close(state.tensors["weights.down"][0, 0], expected, "weights")
    assert_close(outputs[0, -1, 0], expected @ q[-1], "last answer")


def _least_squares_error(weight: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    solution = torch.linalg.lstsq(keys, values).solution.mT
    return (weight - solution).norm() / solution.norm()


def test_window_over_everything_tends_to_least_squares() -> None:
    """eq. 14: with the whole context in the loss and many inner steps, the memory is the regression of its context."""
    count, rounds = 12, 30
    keys = torch.nn.functional.normalize(torch.randn(count, 4, dtype=torch.float64), dim=-1)
    values = torch.randn(count, 3, dtype=torch.float64)
    spec = MemorySpec(network="matrix", window=count, key_width=4, value_width=3, retention="one", chunk=4)
    repeated = [x.repeat(rounds, 1)[None, :, None] for x in (keys, keys, values)]
    step = torch.ones(1, count * rounds, 1, dtype=torch.float64)  # the limiter makes it the largest safe one
    errors = []
    for tokens in (count, count * rounds):
        part = [x[:, :tokens] for x in repeated]
        _, state = memorize(spec, *part, Gates(step=step[:, :tokens]))
        errors.append(_least_squares_error(state.tensors["weights.down"][0, 0], keys, values))
    assert errors[0] > 1e-3  # one reading is not enough
    assert errors[1] < 1e-6


def test_deep_memory_with_identity_is_the_matrix_memory() -> None:
    """σ = identity, W1 = I and slow, no residual: the first layer is the delta rule's matrix, at the chunk's anchor."""
    shared = {"key_width": 3, "chunk": 4, "limiter": False, "retraction": None}
    deep = MemorySpec(network="mlp", activation="identity", fast=("up",), residual=False, expansion=1, **shared)
    # an unreachable cap keeps the matrix on the anchor, which the exact solution would leave
    flat = MemorySpec(network="matrix", write_cap=1e12, **shared)
    problem = make_problem(deep)
    identity = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    problem = problem.replace(initial={"up": problem.initial["up"], "down": identity.clone().requires_grad_()})
    matrix = problem.replace(spec=flat, initial={"down": problem.initial["up"]})
    (outputs, state), (expected, expected_state) = read(memorize, problem), read(memorize, matrix)
    assert_close(outputs, expected, "outputs")
    assert_close(state.tensors["weights.up"], expected_state.tensors["weights.down"], "weights")


def test_polynomial_of_degree_one_without_constant_is_the_identity() -> None:
    problem = make_problem(small_spec("deltanet", feature="polynomial", degree=1))
    coefficients = torch.tensor([0.0, 1.0], dtype=torch.float64)
    padded = torch.nn.functional.pad(problem.initial["down"].detach()[..., 1:], (1, 0))
    expanded = problem.replace(coefficients=coefficients, initial={"down": padded})
    plain = problem.replace(spec=small_spec("deltanet"), coefficients=None, initial={"down": padded[..., 1:]})
    assert_close(read(memorize, expanded)[0], read(memorize, plain)[0], "outputs")


def test_default_coefficients_are_those_of_the_exponential() -> None:
    problem = make_problem(small_spec("swla", degree=3))
    taylor = torch.tensor([1, 1, 1 / 2, 1 / 6], dtype=torch.float64).sqrt()
    (outputs, _), (expected, _) = (read(memorize, problem.replace(coefficients=c)) for c in (None, taylor))
    assert_close(outputs, expected, "outputs")
