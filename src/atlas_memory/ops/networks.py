"""The memory networks: matrix W z (eq. 45), MLP z + W1 σ(W2 z) (eq. 42), gated MLP z + W1 (σ(W2 z) ⊙ W3 z) (eq. 43).

Written once, over a reader that knows what holds the weights:

    reader.read(site, x)    x (..., in) → x Wᵀ (..., out)
    reader.back(site, δ)    δ (..., out) → δ W (..., in)

Sites: "up" and "gate" see the features z, "down" writes the prediction. Hidden activations are scaled to unit norm, so
that a step in (0, 1) means the same for every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory.spec import MemorySpec

# E[GELU(u)²] and E[GELU(u)] for unit-variance u, and the largest slope of GELU.
_GELU_POWER = 0.425
_GELU_MEAN = 0.2821
_GELU_SLOPE = 1.1290


class Reader(Protocol):
    def read(self, site: str, x: Tensor) -> Tensor: ...

    def back(self, site: str, delta: Tensor) -> Tensor: ...


class Factors(NamedTuple):
    """A token's gradient of one layer is δ ⊗ input. Sensitivity: how strongly a change of this layer's output moves the
    prediction, beyond what `curvature` and the layer above say (see the write limiter)."""

    inputs: Tensor  # (..., in)
    deltas: Tensor  # (..., out)
    sensitivity: Tensor | None = None  # (...)


class Network(NamedTuple):
    """forward(reader, z, raw) → prediction; factors(reader, z, raw, error) → prediction, {site: Factors}.

    `error` maps a prediction to the gradient of the objective with respect to it. `curvature` is the factor that the
    layers above "up" and "gate" add to the write limiter's bound, besides ‖W_down‖².
    """

    forward: Callable[[Reader, Tensor, Tensor], Tensor]
    factors: Callable[[Reader, Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, dict[str, Factors]]]
    curvature: float


def memory_network(spec: MemorySpec) -> Network:
    activation = _ACTIVATIONS[spec.activation]
    scale = activation.scale(spec.hidden_width)
    residual = bool(spec.residual)
    return _BUILDERS[spec.network](activation, scale, residual)


def _matrix(activation: Activation, scale: float, residual: bool) -> Network:
    def forward(reader: Reader, z: Tensor, raw: Tensor) -> Tensor:
        return reader.read("down", z)

    def factors(
        reader: Reader, z: Tensor, raw: Tensor, error: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Factors]]:
        prediction = forward(reader, z, raw)
        return prediction, {"down": Factors(z, error(prediction))}

    return Network(forward, factors, curvature=0.0)


def _predict(reader: Reader, residual: bool, hidden: Tensor, raw: Tensor) -> Tensor:
    prediction = reader.read("down", hidden)
    return prediction + raw if residual else prediction


def _mlp(activation: Activation, scale: float, residual: bool) -> Network:
    def forward(reader: Reader, z: Tensor, raw: Tensor) -> Tensor:
        return _predict(reader, residual, activation.value(reader.read("up", z), scale), raw)

    def factors(
        reader: Reader, z: Tensor, raw: Tensor, error: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Factors]]:
        hidden, slope = activation.value_and_slope(reader.read("up", z), scale)
        prediction = _predict(reader, residual, hidden, raw)
        deltas = error(prediction)
        hidden_deltas = reader.back("down", deltas) * slope
        return prediction, {"up": Factors(z, hidden_deltas), "down": Factors(hidden, deltas)}

    return Network(forward, factors, curvature=(scale * activation.largest_slope) ** 2)


def _gated_mlp(activation: Activation, scale: float, residual: bool) -> Network:
    def forward(reader: Reader, z: Tensor, raw: Tensor) -> Tensor:
        hidden = activation.value(reader.read("gate", z), scale) * reader.read("up", z)
        return _predict(reader, residual, hidden, raw)

    def factors(
        reader: Reader, z: Tensor, raw: Tensor, error: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Factors]]:
        value, slope = activation.value_and_slope(reader.read("gate", z), scale)
        up = reader.read("up", z)
        hidden = value * up
        prediction = _predict(reader, residual, hidden, raw)
        deltas = error(prediction)
        hidden_deltas = reader.back("down", deltas)
        gate_slope = slope * up
        return prediction, {
            "gate": Factors(z, hidden_deltas * gate_slope, gate_slope.abs().amax(-1)),
            "up": Factors(z, hidden_deltas * value, value.abs().amax(-1)),
            "down": Factors(hidden, deltas),
        }

    return Network(forward, factors, curvature=1.0)


class Activation(NamedTuple):
    """σ times a scale; and with it its slope, times the same scale."""

    value: Callable[[Tensor, float], Tensor]
    value_and_slope: Callable[[Tensor, float], tuple[Tensor, Tensor]]
    largest_slope: float
    scale: Callable[[int], float]  # hidden width → the scale that gives hidden activations unit norm


class _GeluAndSlope(torch.autograd.Function):
    """GELU(u) − mean and its derivative, both · scale."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, scale: float, mean: float) -> tuple[Tensor, Tensor]:
        slope = torch.ops.aten.gelu_backward(torch.full_like(u, scale), u)
        ctx.save_for_backward(u, slope)
        ctx.scale = scale
        return F.gelu(u).sub_(mean).mul_(scale), slope

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        u, slope = ctx.saved_tensors
        value_gradient, slope_gradient = gradients
        square = u.square()
        # σ'' = (2 − u²) φ(u), φ the normal density
        bend = torch.exp(square * -0.5).mul_(square.neg_().add_(2)).mul_(slope_gradient)
        return torch.addcmul(bend.mul_(ctx.scale / math.sqrt(2 * math.pi)), value_gradient, slope), None, None


def _gelu_and_slope(u: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    value, slope = _GeluAndSlope.apply(u, scale, 0.0)
    return value, slope


def _centred_gelu_and_slope(u: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    value, slope = _GeluAndSlope.apply(u, scale, _GELU_MEAN)
    return value, slope


_ACTIVATIONS = {
    "gelu": Activation(
        lambda u, scale: F.gelu(u) * scale,
        _gelu_and_slope,
        _GELU_SLOPE,
        lambda width: 1 / math.sqrt(_GELU_POWER * width),
    ),
    "centred_gelu": Activation(
        lambda u, scale: F.gelu(u).sub_(_GELU_MEAN).mul_(scale),
        _centred_gelu_and_slope,
        _GELU_SLOPE,
        lambda width: 1 / math.sqrt((_GELU_POWER - _GELU_MEAN**2) * width),
    ),
    # The linear limit, in which reductions to known models are exact: no scale to undo.
    "identity": Activation(
        lambda u, scale: u * scale, lambda u, scale: (u * scale, torch.full_like(u, scale)), 1.0, lambda width: 1.0
    ),
}
_BUILDERS = {"matrix": _matrix, "mlp": _mlp, "gated_mlp": _gated_mlp}
