"""Memory networks: their formula, and factors in closed form against autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory import MemorySpec
from atlas_memory.ops.networks import memory_network
from atlas_memory.ops.sites import Dense
from atlas_memory.spec import CHOICES, SITES

CASES = [
    {"network": network, "activation": activation, "residual": residual}
    for network in CHOICES["network"]
    for activation in CHOICES["activation"]
    for residual in ([False] if network == "matrix" else [False, True])
]
# Activation, and its mean square for unit-variance inputs, which the scale undoes.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float | None]] = {
    "gelu": (F.gelu, 0.425),
    "centred_gelu": (lambda u: F.gelu(u) - 0.2821, 0.425 - 0.2821**2),
    "identity": (lambda u: u, None),
}
IDS = [",".join(str(value) for value in case.values()) for case in CASES]


def _spec(case: dict) -> MemorySpec:
    return MemorySpec(key_width=3, expansion=2, feature="polynomial", degree=2, **case)


def _setting(spec: MemorySpec) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Weights {site: (R, out, in)}, features (R, N, F), raw keys (R, N, D), values (R, N, V)."""
    weights = {site: torch.randn(2, *shape, dtype=torch.float64) for site, shape in spec.site_shapes().items()}
    widths = (spec.feature_width, spec.key_width, spec.value_width)
    return weights, *(torch.randn(2, 4, width, dtype=torch.float64) for width in widths)


def _formula(spec: MemorySpec, weights: dict[str, Tensor], z: Tensor, raw: Tensor) -> Tensor:
    """eq. 42, 43 and 45, as printed, with hidden activations scaled to unit norm."""
    if spec.network == "matrix":
        return z @ weights["down"].mT
    activation, power = ACTIVATIONS[spec.activation]
    scale = 1.0 if power is None else 1 / math.sqrt(power * spec.hidden_width)
    if spec.network == "mlp":
        hidden = activation(z @ weights["up"].mT)
    else:
        hidden = activation(z @ weights["gate"].mT) * (z @ weights["up"].mT)
    prediction = scale * hidden @ weights["down"].mT
    return raw + prediction if spec.residual else prediction


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_forward_is_the_formula(case: dict) -> None:
    spec = _spec(case)
    weights, z, raw, _ = _setting(spec)
    forward = memory_network(spec).forward(Dense(weights), z, raw)
    torch.testing.assert_close(forward, _formula(spec, weights, z, raw))


@pytest.mark.parametrize("decayed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_factors_are_the_gradient_of_every_token(case: dict, decayed: bool) -> None:
    """∇ of ½‖prediction − v‖² with respect to every layer is δ ⊗ input; decays scale the weights it is taken at."""
    spec = _spec(case)
    weights, z, raw, values = _setting(spec)
    decay = torch.rand(2, 4, 1, dtype=torch.float64) if decayed else None
    prediction, factors = memory_network(spec).factors(Dense(weights, decay), z, raw, lambda y: y - values)
    assert set(factors) == set(SITES[spec.network])
    for n in range(4):
        scale = 1 if decay is None else decay[:, n, :, None]
        at = {site: (weight * scale).requires_grad_() for site, weight in weights.items()}
        expected = _formula(spec, at, z[:, n : n + 1], raw[:, n : n + 1])
        torch.testing.assert_close(prediction[:, n : n + 1], expected)
        loss = 0.5 * (expected - values[:, n : n + 1]).square().sum()
        for site, gradient in zip(at, torch.autograd.grad(loss, list(at.values())), strict=True):
            outer = factors[site].deltas[:, n, :, None] * factors[site].inputs[:, n, None]
            torch.testing.assert_close(outer, gradient, msg=lambda text, site=site: f"{site}: {text}")


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_factors_are_differentiable(case: dict) -> None:
    """Second derivatives of the network: the outer loop goes through the inner gradients."""
    spec = _spec(case)
    weights, z, raw, values = _setting(spec)
    tensors = (z[:1, :2], raw[:1, :2], values[:1, :2], *(weight[:1] for weight in weights.values()))

    def function(z: Tensor, raw: Tensor, values: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
        reader = Dense(dict(zip(weights, held, strict=True)))
        prediction, factors = memory_network(spec).factors(reader, z, raw, lambda y: y - values)
        return (prediction, *(leaf for factor in factors.values() for leaf in factor[:2]))

    assert torch.autograd.gradcheck(function, tuple(x.clone().requires_grad_() for x in tensors))


@pytest.mark.parametrize("name", [name for name, (_, power) in ACTIVATIONS.items() if power is not None])
def test_constants_are_moments_of_the_normal_distribution(name: str) -> None:
    function, power = ACTIVATIONS[name]
    u = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    density = torch.exp(-u.square() / 2) / math.sqrt(2 * math.pi)
    assert abs(float(torch.trapezoid(function(u).square() * density, u)) - power) < 1e-3
    if name.startswith("centred"):
        assert abs(float(torch.trapezoid(function(u) * density, u))) < 1e-3


@pytest.mark.parametrize("width", [16, 256])
@pytest.mark.parametrize("activation", [name for name, (_, power) in ACTIVATIONS.items() if power is not None])
def test_hidden_activations_have_about_unit_norm(activation: str, width: int) -> None:
    """So that a step in (0, 1) means the same for every layer."""
    spec = MemorySpec(network="mlp", activation=activation, key_width=width, expansion=4)
    z = F.normalize(torch.randn(1, 500, width), dim=-1)
    weights = {"up": torch.randn(1, 4 * width, width), "down": torch.zeros(1, width, 4 * width)}
    _, factors = memory_network(spec).factors(Dense(weights), z, z, lambda y: y)
    assert abs(float(factors["down"].inputs.square().sum(-1).mean()) - 1) < 0.15


@pytest.mark.parametrize("activation", CHOICES["activation"])
@pytest.mark.parametrize("network", ["mlp", "gated_mlp"])
def test_curvature_bounds_the_layers_above(network: str, activation: str) -> None:
    """‖∂ prediction / ∂ (a first layer's output)‖² ≤ curvature · sensitivity² · ‖W_down‖²: the limiter relies on it."""
    spec = MemorySpec(network=network, activation=activation, key_width=3, expansion=2)
    weights, z, raw, _ = _setting(spec)
    _, factors = memory_network(spec).factors(Dense(weights), z, raw, lambda y: y)
    for site in spec.feature_sites:
        norms = _jacobian_norms(spec, weights, z, raw, site)
        sensitivity = factors[site].sensitivity
        bound = memory_network(spec).curvature * torch.linalg.matrix_norm(weights["down"], ord=2).square()[:, None]
        bound = bound if sensitivity is None else bound * sensitivity.square()
        assert (norms.square() <= bound * (1 + 1e-9)).all(), site


def _jacobian_norms(spec: MemorySpec, weights: dict[str, Tensor], z: Tensor, raw: Tensor, site: str) -> Tensor:
    """‖∂ prediction / ∂ (z W_siteᵀ)‖₂ (R, N)."""

    class Shifted(Dense):
        def __init__(self, shift: Tensor, held: dict[str, Tensor]) -> None:
            super().__init__(held)
            self.shift = shift

        def read(self, name: str, x: Tensor) -> Tensor:
            return super().read(name, x) + (self.shift if name == site else 0)

    def one(shift: Tensor, r: int, n: int) -> Tensor:
        held = {name: weight[r : r + 1] for name, weight in weights.items()}
        return memory_network(spec).forward(Shifted(shift, held), z[r : r + 1, n : n + 1], raw[r : r + 1, n : n + 1])

    zero = torch.zeros(1, 1, spec.hidden_width, dtype=torch.float64)
    norms = [
        [
            torch.linalg.matrix_norm(
                torch.autograd.functional.jacobian(lambda s, r=r, n=n: one(s, r, n), zero).reshape(
                    spec.value_width, spec.hidden_width
                ),
                ord=2,
            )
            for n in range(z.shape[1])
        ]
        for r in range(z.shape[0])
    ]
    return torch.tensor(norms, dtype=torch.float64)
