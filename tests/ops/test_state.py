"""MemoryState: what it holds, how it is moved about, and how it is kept on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from atlas_memory import MemoryState, presets
from atlas_memory.ops import memorize
from tests.support import CHUNK, assert_close, assert_states_identical, make_problem, read, small_spec


def _state(preset: str = "atlas", lengths: tuple[int, ...] = (5, 0, 9), **overrides: Any) -> MemoryState:
    problem = make_problem(small_spec(preset, **overrides), batch=len(lengths), count=9)
    return read(memorize, problem, lengths=list(lengths))[1]


@pytest.mark.parametrize("preset", presets.names())
def test_every_leaf_is_batch_first(preset: str) -> None:
    state = _state(preset)
    assert state.batch == 3
    for name, tensor in state.tensors.items():
        assert tensor.shape[0] == 3, name


def test_counts() -> None:
    state = _state()
    assert state.position == (5, 0, 9)
    assert state.tokens_seen.tolist() == [5, 0, 9]
    assert state.tokens_seen.dtype == torch.long
    assert state.fill == (5 % CHUNK, 0, 9 % CHUNK)
    assert state.nbytes == sum(tensor.numel() * 8 for tensor in state.tensors.values())
    assert state.to(torch.float32).nbytes * 2 == state.nbytes


def test_groups_are_the_leaves_below_a_name() -> None:
    state = _state()
    assert set(state.group("weights")) == {"up", "down"}
    assert state.group("weights")["up"] is state.tensors["weights.up"]


def test_states_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        _state().position = (1, 1, 1)


def test_detach_leaves_the_graph() -> None:
    state = _state("titans")
    assert state.tensors["weights.up"].requires_grad
    detached = state.detach()
    assert not any(tensor.requires_grad for tensor in detached.tensors.values())
    assert_states_identical(detached, state)


def test_clone_shares_no_memory() -> None:
    state = _state().detach()
    clone = state.clone()
    assert_states_identical(clone, state)
    for tensor in clone.tensors.values():
        tensor.add_(1)
    assert not torch.equal(clone.tensors["weights.up"], state.tensors["weights.up"])


def test_to() -> None:
    state = _state()
    half = state.to(torch.bfloat16)
    assert {tensor.dtype for tensor in half.tensors.values()} == {torch.bfloat16}
    assert half.position == state.position
    assert {tensor.device.type for tensor in state.to(device="meta").tensors.values()} == {"meta"}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_select_takes_rows_in_order_and_may_repeat_them(as_tensor: bool) -> None:
    state, rows = _state(), [2, 0, 0, -1]
    chosen = state.select(torch.tensor(rows) if as_tensor else rows)
    assert chosen.position == (9, 5, 5, 9)
    for name, tensor in state.tensors.items():
        assert torch.equal(chosen.tensors[name], tensor[rows]), name


def test_selected_rows_go_on_like_the_whole() -> None:
    spec = small_spec("titans")
    first, second = make_problem(spec, count=7), make_problem(spec, count=5, seed=1)
    _, state = read(memorize, first, lengths=[7, 2])
    expected, _ = read(memorize, second, state=state)
    swapped = second.replace(
        **{name: getattr(second, name)[[1, 0]] for name in ("queries", "keys", "values")},
        gates=second.gates._replace(**{n: g[[1, 0]] for n, g in second.gates._asdict().items() if g is not None}),
    )
    outputs, _ = read(memorize, swapped, state=state.select([1, 0]))
    assert_close(outputs, expected[[1, 0]])


@pytest.mark.parametrize("rows", [[3], [-4], [0, 7]])
def test_select_outside_of_the_batch(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows=.* must lie in a batch of 3"):
        _state().select(rows)


def test_cat_joins_rows() -> None:
    state = _state()
    joined = MemoryState.cat([state.select([0]), state.select([1, 2])])
    assert_states_identical(joined, state)


# On disk.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", presets.names())
def test_saved_and_loaded_bit_for_bit(preset: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = _state(preset).to(dtype)
    state.save(tmp_path / "book.safetensors")
    loaded = MemoryState.load(tmp_path / "book.safetensors")
    assert_states_identical(loaded, state)
    assert not any(tensor.requires_grad for tensor in loaded.tensors.values())
    assert [path.name for path in tmp_path.iterdir()] == ["book.safetensors"]


def test_path_may_be_text(tmp_path: Path) -> None:
    state = _state()
    state.save(str(tmp_path / "book"))
    assert_states_identical(MemoryState.load(str(tmp_path / "book"), state.spec), state)


def test_saving_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "book"
    _state("titans").save(path)
    newer = _state("atlas")
    newer.save(path)
    assert_states_identical(MemoryState.load(path), newer)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, old = tmp_path / "book", _state("titans")
    old.save(path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="disk full"):
        _state("atlas").save(path)
    monkeypatch.undo()
    assert_states_identical(MemoryState.load(path), old)
    assert [entry.name for entry in tmp_path.iterdir()] == ["book"]


def test_saving_into_a_missing_folder_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _state().save(tmp_path / "missing" / "book")
    assert not list(tmp_path.iterdir())


def _rewritten(path: Path, **changes: str | None) -> None:
    """Save a state at `path`, then change its metadata; None removes an entry."""
    _state("titans").save(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata = {name: text for name, text in {**metadata, **changes}.items() if text is not None}
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("keep", [0, 4, 100, -8])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "book"
    _state().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"book'.* is truncated or not a safetensors file"):
        MemoryState.load(path)


def test_text_file(tmp_path: Path) -> None:
    path = tmp_path / "book"
    path.write_text("call me Ishmael " * 10)
    with pytest.raises(ValueError, match="not a safetensors file"):
        MemoryState.load(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_foreign_safetensors_file(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    save_file({"weights.up": torch.zeros(2)}, tmp_path / "book", metadata)
    with pytest.raises(ValueError, match="not a saved memory state"):
        MemoryState.load(tmp_path / "book")


@pytest.mark.parametrize("version", ["2", "banana", None])
def test_other_format_version(version: str | None, tmp_path: Path) -> None:
    _rewritten(tmp_path / "book", version=version)
    with pytest.raises(ValueError, match=r"format version .* this library reads 1"):
        MemoryState.load(tmp_path / "book")


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": None},
        {"spec": "{"},
        {"spec": json.dumps({"chunk": 0})},
        {"spec": json.dumps({"flavour": "vanilla"})},
        {"spec": "[1]"},
        {"position": None},
        {"position": "banana"},
        {"position": "[1]"},
        {"position": "[1, 2, -3]"},
        {"position": '[1, 2, "3"]'},
    ],
    ids=str,
)
def test_damaged_metadata(changes: dict[str, str | None], tmp_path: Path) -> None:
    """Whatever stands in the file: one kind of error, which names the file."""
    _rewritten(tmp_path / "book", **changes)
    with pytest.raises(ValueError, match="book"):
        MemoryState.load(tmp_path / "book")


def test_file_of_another_memory(tmp_path: Path) -> None:
    state = _state("titans")
    state.save(tmp_path / "book")
    with pytest.raises(ValueError, match=r"belongs to another memory: .*chunk: 4 != 8"):
        MemoryState.load(tmp_path / "book", state.spec.replace(chunk=8))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="book"):
        MemoryState.load(tmp_path / "book")
