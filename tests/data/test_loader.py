from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_memory.data import Batch, DataConfig, Loader, RowsConfig, SourceConfig, Store, make_loader, make_rows
from tests.data.support import assert_same, make_store, merged, take

# On machines with few cores torch warns of workers that would be slow; here only their order matters.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

LENGTHS = (9, 1, 30, 2, 17, 5, 64, 3, 11)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("loader") / "store", LENGTHS)


def take_from(loader: Loader, count: int) -> list[Batch]:
    return [next(loader) for _ in range(count)]


def loader_of(store: Store, workers: int = 0, **fields: Any) -> Loader:
    config = RowsConfig(**{"batch": 4, "length": 6, **fields})
    return Loader(make_rows(store, config), rank=1, world=2, workers=workers)


@pytest.mark.parametrize("kind", ["packed", "segments"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_state_counts_what_was_handed_out(store: Store, kind: str, workers: int) -> None:
    rows = make_rows(store, RowsConfig(kind=kind, batch=4, length=6, lengths=((3, 9),)))
    expected = take(rows, 10, 1, 2)
    first = loader_of(store, workers, kind=kind, lengths=((3, 9),))
    begun = take_from(first, 4)
    second = loader_of(store, workers, kind=kind, lengths=((3, 9),))
    second.load_state_dict(first.state_dict())
    assert_same(begun + take_from(second, 6), expected)


@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_states_are_the_same_on_every_rank_and_travel_between_numbers_of_ranks(store: Store, kind: str) -> None:
    config = RowsConfig(kind=kind, batch=6, length=6)
    two = [Loader(make_rows(store, config), rank, 2) for rank in range(2)]
    for loader in two:
        take_from(loader, 5)
    assert two[0].state_dict() == two[1].state_dict()
    three = [Loader(make_rows(store, config), rank, 3, workers=1) for rank in range(3)]
    for loader in three:
        loader.load_state_dict(two[0].state_dict())
    shares = zip(*(take_from(loader, 4) for loader in three), strict=True)
    assert_same([merged(parts) for parts in shares], take(make_rows(store, config), 9)[5:])


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_end_and_can_start_again(store: Store, workers: int) -> None:
    loader = loader_of(store, workers, epochs=1)
    first = list(loader)
    assert list(loader) == []
    loader.restart()
    assert_same(list(loader), first)


@pytest.mark.parametrize("workers", [0, 1])
def test_training_random_numbers_are_left_alone(store: Store, workers: int) -> None:
    before = torch.random.get_rng_state()
    next(loader_of(store, workers))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_rows_travel_to_workers_as_a_path(store: Store) -> None:
    rows = make_rows(store, RowsConfig(batch=4, length=6))
    rows.read()  # opens the maps
    assert_same(take(pickle.loads(pickle.dumps(rows)), 3), take(rows, 3))
    assert len(pickle.dumps(store)) < 2000


def test_made_from_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(10):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"document {number}")
    source = SourceConfig("text", str(tmp_path / "texts"))
    config = DataConfig(source, rows=RowsConfig(batch=2, length=8), validation=0.2, cache=str(tmp_path / "cache"))
    batch = next(make_loader(config, progress=False))
    assert batch.input_ids.shape == (2, 8)
    with pytest.raises(ValueError, match="workers=-1"):
        Loader(make_rows(make_store(tmp_path / "store", [3]), RowsConfig()), workers=-1)
