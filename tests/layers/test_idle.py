"""Tokens that no row writes are read, and not worked on; answers and states are those of the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atlas_memory import Memory, MemorySpec, Monitors, presets
from atlas_memory.ops import engine, memorize
from tests.support import CHUNK, assert_close, assert_states_close, small_memory, tokens

DIM = 6


def _sparing_memory(preset: str = "gated_deltanet", **options: Any) -> Memory:
    """Writes where the first entry of a token is positive, and nowhere else; Muon's momentum gathers there alone."""
    memory = small_memory(preset, gates="hard", tie_retention=presets.make(preset).retention == "learned", **options)
    first = memory.gates.names.index("step")  # the window's are the last
    last = None if memory.spec.optimizer == "muon" else first + 1
    with torch.no_grad():
        for weights in memory.gates.projection.weight.unflatten(0, (memory.heads, -1)):
            weights[first:last] = torch.tensor([100.0] + [0.0] * (DIM - 1))
    return memory


def _written(count: int, begin: int, end: int) -> torch.Tensor:
    """Tokens of which one row writes the first of begin … end, and another the last."""
    x = tokens(3, count, seed=3)
    x[..., 0] = -1
    x[0, begin:end, 0][:1] = 1
    x[2, begin:end, 0][-1:] = 1
    return x


class _Counted:
    """`memorize`, and how many tokens it was given."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, spec: MemorySpec, queries: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        self.tokens += queries.shape[1]
        return memorize(spec, queries, *arguments, **options)


BEGUN = _written(CHUNK, 0, CHUNK)


@pytest.mark.parametrize("answered", [None, 0, 2, CHUNK + 5])
@pytest.mark.parametrize("convolution", [1, 4])
@pytest.mark.parametrize("grain", [1, 3, 256])
@pytest.mark.parametrize("busy", [(0, 1), (1, CHUNK), (3, CHUNK + 6), (0, CHUNK + 6), (CHUNK, CHUNK)])
def test_tokens_that_are_not_written_are_not_worked_on(
    busy: tuple[int, int], grain: int, convolution: int, answered: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, x = _sparing_memory(convolution=convolution), _written(CHUNK + 6, *busy)
    counted = _Counted()
    monkeypatch.setattr("atlas_memory.layers.memory.memorize", counted)
    monkeypatch.setattr("atlas_memory.ops.idle.GRAIN", grain)
    with torch.no_grad():
        _, begun = memory.reference(BEGUN)
        expected, after = memory.reference(x, begun)
        y, state = memory(x, begun, answered=answered)
    stretch = min(-(-busy[1] // grain) * grain, CHUNK + 6) - busy[0] // grain * grain
    assert counted.tokens == (stretch if busy[0] < busy[1] else 0)
    assert_close(y, expected[:, 0 if answered is None else CHUNK + 6 - answered :], "answers")
    assert_states_close(state, after)
    assert torch.equal(after.tensors["weights.down"], begun.tensors["weights.down"]) == (busy[0] == busy[1])


# Of four chunks, tokens that are worked on if none writes, and if one in the third does: whole chunks, but for exact
# memories. Windows have to be known at the end, and momentum goes on to it.
WORKED = {
    "deltanet": (0, 1),
    "ttt": (0, CHUNK),
    "titans": (0, 2 * CHUNK),
    "swla": (2, 2 * CHUNK + 1),
    "omeganet": (CHUNK, 3 * CHUNK),
    "atlas": (CHUNK, 3 * CHUNK),
}


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("preset", WORKED)
def test_memories_at_rest_pass_by_what_is_not_written(
    preset: str, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = _sparing_memory(preset, **({"window": 3} if presets.make(preset).window > 1 else {}))
    x, counted = _written(4 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + (2 if writes else 1)), _Counted()
    monkeypatch.setattr("atlas_memory.layers.memory.memorize", counted)
    monkeypatch.setattr("atlas_memory.ops.idle.GRAIN", 1)
    with torch.no_grad():
        _, begun = memory.reference(_written(CHUNK, 0, 0))
        expected, after = memory.reference(x, begun)
        y, state = memory(x, begun)
    assert counted.tokens == WORKED[preset][writes]
    assert_close(y, expected, "answers")
    assert_states_close(state, after)


@pytest.mark.parametrize("answered", [None, CHUNK + 1])
@pytest.mark.parametrize("preset", ["ttt", "swla", "omeganet"])
def test_chunks_between_writes_are_only_read(
    preset: str, answered: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six chunks the second and the fifth are written in."""
    memory = _sparing_memory(preset, **({"window": 3} if presets.make(preset).window > 1 else {}))
    x, steps = torch.cat([_written(3 * CHUNK, CHUNK + 1, CHUNK + 2)] * 2, dim=1), []
    monkeypatch.setattr(engine, "take_step", lambda *a, take=engine.take_step: (steps.append(1), take(*a))[1])
    with torch.no_grad():
        expected, after = memory.reference(x)
        y, state = memory(x, answered=answered)
    assert len(steps) == 2
    assert_close(y, expected[:, 0 if answered is None else 5 * CHUNK - 1 :], "answers")
    assert_states_close(state, after)


def test_weights_beyond_the_ball_are_drawn_back_where_nothing_is_written() -> None:
    memory = _sparing_memory("omeganet", retraction=0.1)
    with torch.no_grad():
        expected, after = memory.reference(_written(3 * CHUNK, 0, 0))
        y, state = memory(_written(3 * CHUNK, 0, 0))
        begun = memory.initial()["up"].norm() * 3**0.5  # of three rows
    assert after.tensors["weights.up"].norm() < 0.9 * begun
    assert_close(y, expected, "answers")
    assert_states_close(state, after)


def test_momentum_of_muon_fades_while_tokens_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, counted = _sparing_memory("atlas", window=3, interval=CHUNK), _Counted()
    monkeypatch.setattr("atlas_memory.layers.memory.memorize", counted)
    monkeypatch.setattr("atlas_memory.ops.idle.GRAIN", 1)
    x = _written(3 * CHUNK, 0, 0)
    with torch.no_grad():
        _, begun = memory.reference(BEGUN)
        expected, after = memory.reference(x, begun)
        y, state = memory(x, begun)
    assert counted.tokens == CHUNK  # whose last ones are the window of the next
    assert_close(y, expected, "answers")
    assert_states_close(state, after)
    before, faded = (float(state.tensors["momentum.down"].norm()) for state in (begun, after))
    assert 0 < faded < before / 2


@pytest.mark.parametrize("moving", ["pending step", "open window"])
def test_muon_works_on_tokens_that_something_is_still_to_be_done_with(
    moving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, counted = _sparing_memory("atlas", window=3, interval=2 * CHUNK), _Counted()
    monkeypatch.setattr("atlas_memory.layers.memory.memorize", counted)
    x = _written(CHUNK, 0, 0)
    if moving == "open window":
        with torch.no_grad():
            memory.gates.projection.weight.unflatten(0, (memory.heads, -1))[:, -1] *= -1
    with torch.no_grad():
        _, begun = memory.reference(BEGUN if moving == "pending step" else torch.cat([x, x], dim=1))
        expected, after = memory.reference(x, begun)
        y, state = memory(x, begun)
    assert bool(begun.tensors["pending"].any()) == (moving == "pending step")
    assert counted.tokens == CHUNK
    assert_close(y, expected, "answers")
    assert_states_close(state, after)


@pytest.mark.parametrize("moving", ["open chunk", "end in a chunk", "momentum"])
def test_memories_that_are_not_at_rest_work_on_all_tokens(moving: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, counted = _sparing_memory("titans"), _Counted()
    monkeypatch.setattr("atlas_memory.layers.memory.memorize", counted)
    count = CHUNK + (moving == "end in a chunk")
    with torch.no_grad():
        _, begun = memory.reference(_written(CHUNK + (moving == "open chunk"), 0, 0))
        if moving == "momentum":
            begun = begun.updated({"momentum.down": torch.full_like(begun.tensors["momentum.down"], 1e-3)})
        expected, after = memory.reference(_written(count, 0, 0), begun)
        y, state = memory(_written(count, 0, 0), begun)
    assert counted.tokens == count
    assert_close(y, expected, "answers")
    assert_states_close(state, after)


@pytest.mark.parametrize("watching", ["gradients", "monitors", "padding"])
def test_all_tokens_are_worked_on_where_they_matter(watching: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _sparing_memory()
    counted, options = _Counted(), dict[str, Any]()
    monkeypatch.setattr("atlas_memory.layers.memory.memorize", counted)
    if watching == "monitors":
        options["monitors"] = Monitors()
    if watching == "padding":
        options["mask"] = torch.arange(CHUNK) < torch.tensor([[CHUNK], [CHUNK - 1], [CHUNK]])
    with torch.no_grad():
        _, begun = memory.reference(BEGUN)
    with torch.set_grad_enabled(watching == "gradients"):
        memory(_written(CHUNK, 0, 0), begun, **options)
    assert counted.tokens == CHUNK
