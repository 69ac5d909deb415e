from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atlas_memory.data import IGNORED, Batch, RowsConfig, make_rows
from atlas_memory.ops.packing import Packing
from tests.data.support import assert_same, make_store


@pytest.fixture
def packed(tmp_path: Path) -> Batch:
    return make_rows(make_store(tmp_path, [4, 9, 2]), RowsConfig(batch=3, length=5, shuffle=False)).read()


def test_bounds_are_those_of_rows_and_documents_laid_end_to_end(packed: Batch) -> None:
    # Documents begin at 0, 4, 13 of the stream, rows at 0, 5, 10.
    assert packed.cu_seqlens.tolist() == [0, 4, 5, 10, 13, 15]
    inputs = packed.model_inputs()
    assert inputs["input_ids"].shape == inputs["labels"].shape == inputs["shift_labels"].shape == (1, 15)
    assert "attention_mask" not in inputs


def test_labels_are_the_targets_unshifted(packed: Batch) -> None:
    labels = packed.labels
    assert (labels[:, 0] == IGNORED).all()
    assert torch.equal(labels[:, 1:], packed.targets[:, :-1])
    asked = labels != IGNORED
    assert torch.equal(labels[asked], packed.input_ids[asked])
    assert not (asked & packed.starts).any()


def test_rows_with_padding_bring_their_mask(tmp_path: Path) -> None:
    config = RowsConfig(kind="segments", batch=2, length=5, shuffle=False)
    rows = make_rows(make_store(tmp_path, [7, 10]), config)
    assert set(rows.read().model_inputs()) == {"input_ids", "labels", "shift_labels"}
    rows.advance()
    batch = rows.read()
    assert batch.lengths.tolist() == [2, 5]
    assert batch.fresh.tolist() == [False, False]
    assert torch.equal(batch.model_inputs()["attention_mask"], batch.mask)
    assert (batch.input_ids[0, 2:] == 257).all()


def test_split_gives_micro_batches_of_whole_rows(packed: Batch) -> None:
    parts = list(packed.split(2))
    assert [len(part.input_ids) for part in parts] == [2, 1]
    assert torch.equal(torch.cat([part.targets for part in parts]), packed.targets)
    assert_same([packed.to("cpu")], [packed])


def test_the_operator_takes_bounds_and_masks_as_they_are(packed: Batch, tmp_path: Path) -> None:
    assert Packing(1, 15, None, packed.cu_seqlens).lengths == [4, 1, 5, 3, 2]
    rows = make_rows(make_store(tmp_path / "two", [7, 3]), RowsConfig(kind="segments", batch=3, length=5, epochs=1))
    batch = rows.read()
    assert sorted(Packing(3, 5, batch.mask, None).lengths) == [0, 3, 5]
    assert Packing(3, 5, batch.mask, None).lengths == batch.lengths.tolist()


def test_what_decides_shapes_stays_on_the_host(packed: Batch) -> None:
    moved = packed.to("meta")
    assert moved.input_ids.is_meta and moved.targets.is_meta and moved.background.is_meta
    assert torch.equal(moved.cu_seqlens, packed.cu_seqlens)
    assert torch.equal(moved.mask, packed.mask)
