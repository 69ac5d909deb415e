"""Problems for the operator, ways to run them, and the one comparison all tests share.

Shapes: B batch, T tokens, H heads, D key width, V value width, W window.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from atlas_memory import Memory, MemorySpec, MemoryState, presets
from atlas_memory.layers.initial_weights import InitialWeights
from atlas_memory.ops import Gates

# Of the comparison of a fast path with the definition, in float64.
RELATIVE = 1e-6
# Entries that cancel to zero carry the rounding errors of the others: of this share of the largest entry at most.
ABSOLUTE = 1e-9
# Tensors smaller than this are zero up to rounding.
SMALLEST_SCALE = 1e-3

CHUNK = 4
SMALL = {"key_width": 3, "expansion": 2, "chunk": CHUNK}
# Of infinite first layers: short enough to matter in a few tokens.
SMALL_HORIZON, SMALL_PAIRS = 6, 2

Operator = Callable[..., tuple[Tensor, MemoryState]]
Module = TypeVar("Module", bound=torch.nn.Module)


def small_fields(preset: str) -> dict[str, Any]:
    spec, fields = presets[preset], dict(SMALL)
    if spec.horizon is not None:
        fields["horizon"] = SMALL_HORIZON
    if spec.initial_pairs:
        fields["initial_pairs"] = SMALL_PAIRS
    return fields


def small_spec(preset: str, **overrides: Any) -> MemorySpec:
    return presets.make(preset, **{**small_fields(preset), **overrides})


def small_memory(
    preset: str, dim: int = 6, heads: int = 2, dtype: torch.dtype = torch.float64, **options: Any
) -> Memory:
    """A layer with the widths of SMALL, the same one for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return talkative(Memory(dim, heads, preset, **{**small_fields(preset), **options}).to(dtype))


def talkative(module: Module) -> Module:
    """Whose deep memories say something from the start, as trained ones do: else few tokens would test little."""
    for part in module.modules():
        if isinstance(part, InitialWeights) and "down" in part.full:
            torch.nn.init.normal_(part.full["down"], std=0.5 / part.full["down"].shape[-2] ** 0.5)
    return module


def tokens(batch: int, count: int, dim: int = 6, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Inputs of a layer (B, T, dim)."""
    return torch.randn(batch, count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of one reading; every tensor is a leaf that wants its gradient."""

    spec: MemorySpec
    queries: Tensor
    keys: Tensor
    values: Tensor
    gates: Gates
    initial: Mapping[str, Tensor]
    coefficients: Tensor | None

    @property
    def batch(self) -> int:
        return self.keys.shape[0]

    @property
    def count(self) -> int:
        return self.keys.shape[1]

    def leaves(self) -> dict[str, Tensor]:
        named = {"queries": self.queries, "keys": self.keys, "values": self.values}
        named |= {f"gates.{name}": gate for name, gate in self.gates._asdict().items() if gate is not None}
        named |= {f"initial.{site}": weight for site, weight in self.initial.items()}
        return named if self.coefficients is None else {**named, "coefficients": self.coefficients}

    def replace(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)

    def with_gates_inside(self) -> Problem:
        """The same with all gates between 0.1 and 0.9: for comparisons that are not defined at the ends."""
        inside = (None if gate is None else (gate.detach() * 0.8 + 0.1).requires_grad_() for gate in self.gates)
        return self.replace(gates=Gates(*inside))

    def part(self, begin: int, end: int | None = None) -> tuple[Tensor, Tensor, Tensor, Gates]:
        """Queries, keys, values and gates of some of the tokens; of all of them, the leaves themselves."""
        if begin == 0 and end in (None, self.count):
            return self.queries, self.keys, self.values, self.gates
        cut = slice(begin, end)
        gates = Gates(*(None if gate is None else gate[:, cut] for gate in self.gates))
        return self.queries[:, cut], self.keys[:, cut], self.values[:, cut], gates


def make_problem(spec: MemorySpec, batch: int = 2, count: int = 11, heads: int = 2, seed: int = 0) -> Problem:
    """Random tokens and gates; about a third of all gates are exactly 0 or exactly 1.

    Keys differ in length: among unit keys with equal gates the write limiter's largest row sum is not unique, and its
    gradient is whichever of them rounding prefers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    def gate(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=generator, dtype=torch.float64) * 1.6 - 0.3).clamp(0, 1)

    def retention(*shape: int) -> Tensor:
        """Mostly near 1, so that what was written long ago still counts, with an exact 0 now and then."""
        chance, value = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
        inside = 0.7 + 0.3 * value
        return torch.where(chance < 0.06, 0.0, torch.where(chance > 0.7, 1.0, inside))

    place = (batch, count, heads)
    gates = Gates(
        retention=retention(*place) if spec.retention == "learned" else None,
        momentum=gate(*place) if spec.carries_momentum else None,
        step=gate(*place) if spec.step == "learned" else None,
        window=gate(*place, spec.window) if spec.window > 1 else None,
    )
    initial = {site: normal(heads, *shape) for site, shape in spec.initial_shapes().items()}
    coefficients = None
    if spec.feature == "exponential":
        coefficients = torch.rand(1, generator=generator, dtype=torch.float64) + 0.5
    if spec.feature == "polynomial":
        coefficients = torch.rand(spec.degree + 1, generator=generator, dtype=torch.float64) + 0.3
    key_lengths = torch.rand(*place, 1, generator=generator, dtype=torch.float64) * 0.6 + 0.7
    queries, keys = unit(*place, spec.key_width), unit(*place, spec.key_width) * key_lengths
    problem = Problem(spec, queries, keys, normal(*place, spec.value_width), gates, initial, coefficients)
    for leaf in problem.leaves().values():
        leaf.requires_grad_()
    return problem


@dataclasses.dataclass(frozen=True)
class Result:
    outputs: Tensor
    state: MemoryState
    gradients: dict[str, Tensor]


def read(
    operator: Operator,
    problem: Problem,
    splits: Sequence[int] = (),
    lengths: Sequence[int] | None = None,
    state: MemoryState | None = None,
    **options: Any,
) -> tuple[Tensor, MemoryState]:
    """Run a problem in several calls, cut at `splits`, each going on from the state of the one before."""
    real = [problem.count] * problem.batch if lengths is None else lengths
    outputs = []
    for begin, end in itertools.pairwise([0, *splits, problem.count]):
        here = [min(max(n - begin, 0), end - begin) for n in real]
        y, state = operator(
            problem.spec,
            *problem.part(begin, end),
            problem.initial if state is None else None,
            state=state,
            coefficients=problem.coefficients,
            lengths=here,
            **options,
        )
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def solve(
    operator: Operator,
    problem: Problem,
    splits: Sequence[int] = (),
    lengths: Sequence[int] | None = None,
    state: MemoryState | None = None,
    **options: Any,
) -> Result:
    """Outputs, final state, and the gradients of a random mix of both with respect to every leaf.

    A given state is a set of leaves as well.
    """
    leaves = problem.leaves()
    if state is not None:
        state = state.map(lambda tensor: tensor.detach().clone().requires_grad_())
        leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith("initial.")}
        leaves |= {f"state.{name}": tensor for name, tensor in state.tensors.items()}
    outputs, after = read(operator, problem, splits, lengths, state, **options)
    gradients = gradients_of(random_mix(outputs, after), leaves)
    return Result(outputs.detach(), after.detach(), gradients)


def random_mix(outputs: Tensor, state: MemoryState) -> Tensor:
    """A scalar that depends on every entry of the outputs and of the state."""
    generator = torch.Generator().manual_seed(5)
    parts = [outputs, *(tensor for _, tensor in sorted(state.tensors.items()))]
    return sum(
        (
            (part * torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.dtype)).sum()
            for part in parts
        ),
        start=outputs.new_zeros(()),
    )


def gradients_of(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def assert_close(actual: Tensor, expected: Tensor, name: str = "tensor", relative: float = RELATIVE) -> None:
    """Equal up to `relative`, and to a much smaller share of the largest entry."""
    scale = max(float(expected.detach().abs().max()) if expected.numel() else 0.0, SMALLEST_SCALE)
    absolute = scale * relative * (ABSOLUTE / RELATIVE)
    torch.testing.assert_close(
        actual, expected, rtol=relative, atol=absolute, msg=lambda text: f"{name}: {text}", check_stride=False
    )


def assert_states_close(actual: MemoryState, expected: MemoryState) -> None:
    assert actual.spec == expected.spec
    assert actual.position == expected.position
    assert sorted(actual.tensors) == sorted(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert_close(actual.tensors[name], tensor, f"state.{name}")


def assert_states_identical(actual: MemoryState, expected: MemoryState) -> None:
    """Bit for bit."""
    assert actual.spec == expected.spec
    assert actual.position == expected.position
    assert sorted(actual.tensors) == sorted(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert actual.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(actual.tensors[name], tensor), name


def assert_same(actual: Result, expected: Result) -> None:
    assert_close(actual.outputs, expected.outputs, "outputs")
    assert_states_close(actual.state, expected.state)
    assert sorted(actual.gradients) == sorted(expected.gradients)
    for name, gradient in expected.gradients.items():
        assert_close(actual.gradients[name], gradient, f"gradient of {name}")


def assert_readings_same(
    actual: tuple[Tensor, MemoryState], expected: tuple[Tensor, MemoryState], leaves: Mapping[str, Tensor]
) -> None:
    """Two readings of a layer agree in outputs, state, and the gradients of a mix of both."""
    assert_close(actual[0], expected[0], "outputs")
    assert_states_close(actual[1], expected[1])
    gradients, expected_gradients = (gradients_of(random_mix(*result), leaves) for result in (actual, expected))
    for name in leaves:
        assert_close(gradients[name], expected_gradients[name], f"gradient of {name}")
