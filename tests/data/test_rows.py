from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atlas_memory.data import IGNORED, Batch, PackedRows, Rows, RowsConfig, SegmentRows, Store, StoredLessons, make_rows
from atlas_memory.data.order import DocumentOrder
from tests.data.support import assert_same, make_store, merged, take

LENGTHS = (9, 1, 30, 2, 17, 5, 64, 3, 11)
KINDS = [
    {"kind": "packed"},
    {"kind": "packed", "boundaries": "carry"},
    {"kind": "packed", "epochs": 2},
    {"kind": "segments"},
    {"kind": "segments", "epochs": 2, "minimum_tokens": 4},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("rows") / "store", LENGTHS)


def rows_of(store: Store, **fields: Any) -> Rows:
    return make_rows(store, RowsConfig(**{"batch": 6, "length": 7, "seed": 3, **fields}))


def stream(store: Store, config: RowsConfig, epochs: int) -> tuple[list[int], list[bool]]:
    """The definition of the packed stream: every epoch's documents, end to end; and where documents begin."""
    order = DocumentOrder(np.arange(len(store)), np.diff(store.offsets), config.seed, config.shuffle)
    tokens: list[int] = []
    first: list[bool] = []
    for epoch in range(epochs):
        for document in order.epoch(epoch).documents:
            ids = store.document(document).tolist()
            tokens += ids
            first += [True] + [False] * (len(ids) - 1)
    return tokens, first


def read_lanes(store: Store, config: RowsConfig) -> tuple[list[int], list[int], list[Batch]]:
    """All that packed rows read, lane after lane and epoch after epoch: tokens, targets; and the batches."""
    rows, batches = PackedRows(store, config), []
    tokens: dict[tuple[int, int], list[int]] = {}
    targets: dict[tuple[int, int], list[int]] = {}
    while not rows.done:
        batch, epoch = rows.read(), rows.epoch
        for row, mask in enumerate(batch.mask):
            tokens.setdefault((epoch, row), []).extend(batch.input_ids[row, mask].tolist())
            targets.setdefault((epoch, row), []).extend(batch.targets[row, mask].tolist())
        batches.append(batch)
        rows.advance()
    return *(list(itertools.chain(*(parts[key] for key in sorted(parts)))) for parts in (tokens, targets)), batches


@pytest.mark.parametrize("fields", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_every_number_of_ranks_gives_the_same_global_batches(store: Store, fields: dict[str, Any], world: int) -> None:
    alone = take(rows_of(store, **fields), 12)
    shares = [take(rows_of(store, **fields), 12, rank, world) for rank in range(world)]
    assert_same(alone, [merged(parts) for parts in zip(*shares, strict=True)])


@pytest.mark.parametrize("fields", KINDS)
@pytest.mark.parametrize("stop", range(8))
def test_resumed_equals_uninterrupted(store: Store, fields: dict[str, Any], stop: int) -> None:
    fields = {**fields, "lengths": ((2, 3), (5, 16))}
    whole = take(rows_of(store, **fields), 9)
    begun = rows_of(store, **fields)
    take(begun, stop, rank=1, world=2)
    state = json.loads(json.dumps(begun.state_dict()))
    # Another number of ranks goes on from it.
    shares = []
    for rank in range(3):
        resumed = rows_of(store, **fields)
        resumed.load_state_dict(state)
        shares.append(take(resumed, 9 - stop, rank, 3))
    assert_same(whole[stop:], [merged(parts) for parts in zip(*shares, strict=True)])


@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=8),
    batch=st.integers(1, 5),
    length=st.integers(1, 20),
    later=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    boundaries=st.sampled_from(["reset", "carry"]),
)
def test_packed_rows_are_the_stream_without_a_gap(
    lengths: list[int], batch: int, length: int, later: int, seed: int, boundaries: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), lengths)
        config = RowsConfig(
            batch=batch, length=length, lengths=((2, later),), seed=seed, boundaries=boundaries, epochs=3
        )
        tokens, first = stream(store, config, 3)
        read, targets, batches = read_lanes(store, config)
        assert [batch.input_ids.shape[1] for batch in batches[:3]] == [length, length, later][: len(batches)]
        assert read == tokens
        reset = boundaries == "reset"
        follows = [IGNORED if begins and reset else t for t, begins in zip(tokens[1:], first[1:], strict=True)]
        assert targets == [*follows, IGNORED]
        assert all((batch.targets[~batch.mask] == IGNORED).all() for batch in batches)
        assert [batch.target_count for batch in batches] == [int((b.targets != IGNORED).sum()) for b in batches]
        assert [batch.token_count for batch in batches] == [int(b.mask.sum()) for b in batches]


@pytest.mark.parametrize("boundaries", ["reset", "carry"])
def test_memory_starts_at_rows_and_at_documents_when_reset(store: Store, boundaries: str) -> None:
    config = RowsConfig(batch=6, length=7, seed=3, boundaries=boundaries)
    _, first = stream(store, config, 1)
    batch = PackedRows(store, config).read()
    lanes = [row * len(first) // 6 for row in range(6)]  # rows stand far apart in the stream
    expected = torch.tensor([first[begin : begin + 7] for begin in lanes]) & (boundaries == "reset")
    expected[:, 0] = True
    assert torch.equal(batch.starts, expected)
    assert batch.packed == (boundaries == "reset")
    assert batch.fresh.all()


def test_every_epoch_reads_every_document_once_in_its_own_order(store: Store) -> None:
    order = DocumentOrder(np.arange(len(store)), np.diff(store.offsets), seed=5, shuffle=True)
    orders = [order.epoch(number).documents.tolist() for number in range(4)]
    assert all(sorted(documents) == list(range(len(store))) for documents in orders)
    assert len({tuple(documents) for documents in orders}) == 4
    # Written down: a training run resumed after an upgrade must read on in the same order.
    assert orders[:2] == [[4, 1, 3, 6, 5, 7, 8, 2, 0], [0, 6, 7, 4, 1, 2, 5, 8, 3]]


def test_without_shuffling_documents_keep_their_order(store: Store) -> None:
    config = RowsConfig(batch=6, length=7, shuffle=False, epochs=1)
    assert read_lanes(store, config)[0] == store.tokens.tolist()


def test_seeds_give_different_rows(store: Store) -> None:
    one, other = (take(rows_of(store, seed=seed), 1)[0] for seed in (1, 2))
    assert not torch.equal(one.input_ids, other.input_ids)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    batch=st.integers(1, 5),
    length=st.integers(1, 12),
    later=st.integers(1, 12),
    seed=st.integers(0, 100),
)
def test_segments_follow_one_document_at_a_time(
    lengths: list[int], batch: int, length: int, later: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder), lengths)
        config = RowsConfig(kind="segments", batch=batch, length=length, lengths=((3, later),), seed=seed, epochs=2)
        batches = take(SegmentRows(StoredLessons(store, config), config), 10_000)
        seen = list(itertools.chain.from_iterable(_documents_of(batches, row) for row in range(batch)))
        expected = [store.document(number).tolist() for number in range(len(store))]
        assert sorted(seen) == sorted(expected * 2)
        assert [b.target_count for b in batches] == [int((b.targets != IGNORED).sum()) for b in batches]
        assert [b.token_count for b in batches] == [int(b.mask.sum()) for b in batches]


def _documents_of(batches: list[Any], row: int) -> list[list[int]]:
    """What one row reads, put together at its fresh flags; the targets are checked on the way."""
    documents: list[list[int]] = []
    targets: list[list[int]] = []
    for batch in batches:
        real = int(batch.lengths[row])
        assert batch.mask[row, :real].all()
        assert (batch.targets[row, real:] == IGNORED).all()
        if real and batch.fresh[row]:
            documents.append([])
            targets.append([])
        if real:
            documents[-1] += batch.input_ids[row, :real].tolist()
            targets[-1] += batch.targets[row, :real].tolist()
    for document, target in zip(documents, targets, strict=True):
        assert target == [*document[1:], IGNORED]
    return documents


def test_short_documents_can_be_left_out_of_segments(store: Store) -> None:
    batches = take(rows_of(store, kind="segments", minimum_tokens=11, epochs=1), 100)
    assert sum(int(batch.mask.sum()) for batch in batches) == sum(n for n in LENGTHS if n >= 11)
    with pytest.raises(ValueError, match="minimum_tokens=65 leaves no document; the longest has 64"):
        rows_of(store, kind="segments", minimum_tokens=65)


@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_epochs_end(store: Store, kind: str) -> None:
    rows = rows_of(store, kind=kind, epochs=2)
    take(rows, 10_000)
    assert rows.done
    with pytest.raises(ValueError, match="all 2 epochs are read"):
        rows.read()


def test_states_of_other_data_are_refused(store: Store, tmp_path: Path) -> None:
    state = rows_of(store).state_dict()
    with pytest.raises(ValueError, match="seed: 3 != 4"):
        rows_of(store, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="kind: 'packed' != 'segments'"):
        rows_of(store, kind="segments").load_state_dict(state)
    with pytest.raises(ValueError, match="data: "):
        rows_of(make_store(tmp_path, [3, 4])).load_state_dict(state)
    with pytest.raises(ValueError, match="batch: 6 != 5"):
        rows_of(store, kind="segments", batch=5).load_state_dict(rows_of(store, kind="segments").state_dict())
    with pytest.raises(ValueError, match="state has no place"):
        rows_of(store).load_state_dict({name: value for name, value in state.items() if name != "place"})


def test_ranks_are_checked(store: Store) -> None:
    with pytest.raises(ValueError, match="rank=2, world=2: rank must be less than world"):
        rows_of(store).read(2, 2)
    with pytest.raises(ValueError, match="world at most batch=6"):
        rows_of(store).read(0, 7)


def test_a_row_of_a_batch_is_cut_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is asked for its tokens and for the sums of the global batch."""
    cut, seen = StoredLessons.cut, []
    monkeypatch.setattr(StoredLessons, "cut", lambda self, *place: seen.append(place) or cut(self, *place))
    take(rows_of(store, kind="segments"), 3)
    assert len(seen) == 3 * rows_of(store, kind="segments").config.batch
