"""Rows, paddings and packings → right-padded rows, and back."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from atlas_memory.ops.packing import Packing, last_rows, take_rows


def _rows(batch: int, count: int) -> Tensor:
    """(B, T, 2), no entry zero: what is zero in an answer was put there."""
    return torch.arange(1.0, batch * count * 2 + 1).reshape(batch, count, 2)


@given(data=st.data(), count=st.integers(0, 6), size=st.integers(0, 6))
def test_take_rows(data: st.DataObject, count: int, size: int) -> None:
    starts = data.draw(st.lists(st.integers(-4, 7), min_size=1, max_size=3))
    lengths = data.draw(st.none() | st.lists(st.integers(0, size), min_size=len(starts), max_size=len(starts)))
    x = _rows(len(starts), count)
    taken = take_rows(x, starts, size, lengths)
    assert taken.shape == (len(starts), size, 2)
    for r, start in enumerate(starts):
        for place in range(size):
            kept = lengths is None or place < lengths[r]
            inside = kept and 0 <= start + place < count
            expected = x[r, start + place] if inside else torch.zeros(2)
            assert torch.equal(taken[r, place], expected)


@given(data=st.data(), count=st.integers(1, 6), size=st.integers(0, 4))
def test_last_rows(data: st.DataObject, count: int, size: int) -> None:
    ends = data.draw(st.lists(st.integers(0, count), min_size=1, max_size=3))
    lengths = [data.draw(st.integers(0, min(size, end))) for end in ends]
    x = _rows(len(ends), count)
    last = last_rows(x, ends, size, lengths)
    for r, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        assert torch.equal(last[r, size - length :], x[r, end - length : end])
        assert not last[r, : size - length].any()


def test_taking_rows_passes_gradients_to_what_was_taken() -> None:
    x = _rows(2, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(take_rows(x, [1, -1], 3, [3, 2]).sum(), x)
    assert gradient[..., 0].tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]


def test_nothing_to_do() -> None:
    packing, x = Packing(2, 3, None, None), _rows(2, 3)
    assert packing.plain
    assert packing.lengths == [3, 3]
    assert torch.equal(packing.pack(packing.unpack(x)), x)


@pytest.mark.parametrize(
    ("mask", "starts", "lengths"),
    [
        ([[1, 1, 0], [1, 0, 0]], [0, 0], [2, 1]),
        ([[0, 1, 1], [0, 0, 1]], [1, 2], [2, 1]),
        ([[0, 1, 0], [1, 1, 1]], [1, 0], [1, 3]),
        ([[0, 0, 0], [1, 1, 0]], [0, 0], [0, 2]),
        ([[0, 0, 0], [0, 0, 0]], [0, 0], [0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_mask(mask: list[list[int]], starts: list[int], lengths: list[int], dtype: torch.dtype) -> None:
    packing, x = Packing(2, 3, torch.tensor(mask, dtype=dtype), None), _rows(2, 3)
    assert packing.lengths == lengths
    unpacked = packing.unpack(x)
    for r, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert torch.equal(unpacked[r, :length], x[r, start : start + length])
        assert not unpacked[r, length:].any()
    assert torch.equal(packing.pack(unpacked), x * torch.tensor(mask)[..., None])


@pytest.mark.parametrize("as_tensor", [True, False])
def test_packed_sequences(as_tensor: bool) -> None:
    bounds, x = [0, 2, 2, 5], _rows(1, 5)
    packing = Packing(1, 5, None, torch.tensor(bounds, dtype=torch.int32) if as_tensor else bounds)
    assert packing.rows == 3
    assert packing.lengths == [2, 0, 3]
    unpacked = packing.unpack(x)
    assert unpacked.shape == (3, 3, 2)
    assert torch.equal(unpacked[0, :2], x[0, :2])
    assert not unpacked[1].any()
    assert torch.equal(unpacked[2], x[0, 2:])
    assert torch.equal(packing.pack(unpacked), x)


def test_packed_sequences_of_unlike_lengths_are_not_laid_side_by_side() -> None:
    assert Packing(1, 10, None, [0, 4, 7, 10]).groups() == [[0, 1, 2]]
    assert Packing(2, 4, torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]), None).groups() == [[0, 1]]
    assert Packing(1, 0, None, [0, 0, 0]).groups() == [[0, 1]]
    many = Packing(1, 2048 + 128 * 8, None, [0, 2048, *range(2056, 3073, 8)])
    groups = many.groups()
    assert groups == [list(range(1, 129)), [0]]
    parts = [many.part(numbers) for numbers in groups]
    assert sum(part.rows * max(part.lengths) for part in parts) == many.tokens


@pytest.mark.parametrize(
    ("batch", "mask", "bounds", "named"),
    [
        (1, torch.ones(1, 4), [0, 4], "mask and cu_seqlens"),
        (2, None, [0, 4], "cu_seqlens needs one row"),
        (1, None, [0, 3], r"cu_seqlens=\[0, 3\]"),
        (1, None, [1, 4], r"cu_seqlens=\[1, 4\]"),
        (1, None, [0, 3, 2, 4], r"cu_seqlens=\[0, 3, 2, 4\]"),
        (1, None, [0], r"cu_seqlens=\[0\]"),
        (1, None, [0, 1.7, 4], "cu_seqlens=.* must hold whole numbers"),
        (1, [[1, 1, 1, 1]], None, "mask must be a tensor, got list"),
        (1, torch.ones(1, 3), None, r"mask must have shape .*\(1, 4\)"),
        (1, torch.ones(4), None, "mask must have shape"),
        (2, torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]), None, "mask row 1 has padding between real tokens"),
    ],
)
def test_bad_layouts_are_named(batch: int, mask: Tensor | None, bounds: list[int] | None, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Packing(batch, 4, mask, bounds)
