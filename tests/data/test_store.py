from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_memory.data import DamagedStoreError, DataConfig, SourceConfig, open_store, train_tokenizer
from atlas_memory.data import store as store_module
from atlas_memory.data.folders import replace_folder
from atlas_memory.data.store import cache_folder
from atlas_memory.data.tokenizing import tokenise
from tests.data.support import byte_encoder

TEXTS = [f"document {number}, naïve\n" * (number + 1) for number in range(12)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text)
    return DataConfig(SourceConfig("text", str(tmp_path / "texts")), cache=str(tmp_path / "cache"), validation=0.25)


def refuse(*_: Any) -> Any:
    raise AssertionError("tokenised again")


def folder_of(config: DataConfig) -> Path:
    return open_store(config, "all", progress=False).folder


def test_documents_are_kept_with_their_ends(config: DataConfig) -> None:
    store = open_store(config, "all", progress=False)
    assert len(store) == len(TEXTS)
    assert [bytes(store.document(n)[:-1].astype(np.uint8)).decode() for n in range(len(store))] == TEXTS
    assert all(store.document(n)[-1] == store.end == 256 for n in range(len(store)))
    assert (store.pad, store.vocabulary, store.tokens.dtype) == (257, 258, np.uint16)
    assert store.token_count == len(store.tokens) == store.offsets[-1]
    store.verify()


def test_a_second_run_tokenises_nothing(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_store(config, "train", progress=False)
    monkeypatch.setattr(store_module, "tokenise", refuse)
    second = open_store(config, "train", progress=False)
    assert second.digest == first.digest
    assert second.folder == first.folder
    assert not list(first.folder.parent.glob(".*unfinished"))


def test_splits_have_stores_of_their_own(config: DataConfig) -> None:
    sizes = {split: len(open_store(config, split, progress=False)) for split in ("train", "validation", "all")}
    assert sizes == {"train": 9, "validation": 3, "all": 12}


def test_what_went_in_decides_which_store_it_is(config: DataConfig, tmp_path: Path) -> None:
    first = open_store(config, "all", progress=False)
    bpe = train_tokenizer(TEXTS, 300, tmp_path / "bpe", progress=False)
    other = DataConfig(config.source, tokenizer=str(tmp_path / "bpe"), cache=config.cache)
    assert open_store(other, "all", progress=False).token_count < first.token_count
    assert open_store(other, "all", progress=False).vocabulary == len(bpe)
    (tmp_path / "texts" / "00.txt").write_text("changed")
    assert open_store(config, "all", progress=False).digest != first.digest


def truncate(folder: Path) -> None:
    os.truncate(folder / "tokens.bin", 11)


def flip(folder: Path) -> None:
    content = bytearray((folder / "tokens.bin").read_bytes())
    content[7] ^= 1
    (folder / "tokens.bin").write_bytes(content)


def forget_offsets(folder: Path) -> None:
    (folder / "offsets.npy").unlink()


def forget_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def half_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 30)


def other_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def foreign(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "fingerprint": "f" * 64}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "tokens.bin has 11 bytes instead of"),
        (flip, "tokens.bin has another content"),
        (forget_offsets, "offsets.npy has 0 bytes instead of"),
        (forget_manifest, "manifest.json cannot be read"),
        (half_manifest, "manifest.json cannot be read"),
        (other_manifest, "manifest.json cannot be read"),
        (foreign, "was made of something else"),
    ],
)
def test_damage_is_noticed_said_and_repaired(
    config: DataConfig, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], said: str
) -> None:
    digest = open_store(config, "all", progress=False).digest
    damage(folder_of(config))
    with caplog.at_level(logging.WARNING):
        repaired = open_store(config, "all", progress=False)
    assert f"rebuilding the cache: {repaired.folder}" in caplog.text
    assert said in caplog.text
    assert repaired.digest == digest
    repaired.verify()


def test_large_stores_are_verified_on_request(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(folder_of(config))
    monkeypatch.setattr(store_module, "QUICK_CHECK_BYTES", 0)
    with pytest.raises(DamagedStoreError, match=r"tokens\.bin has another content"):
        open_store(config, "all", progress=False).verify()


def test_a_failed_build_leaves_nothing(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "texts" / "05.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"05\.txt: byte 0 is not UTF-8"):
        open_store(config, "all", progress=False)
    assert all(path.suffix == ".lock" for path in Path(str(config.cache)).iterdir())


BUILDER = """
import os, signal, sys, time
from atlas_memory.data import DataConfig, SourceConfig, open_store, store
folder, behaviour = sys.argv[1:]
real = store.tokenise
def observed(*arguments):
    with open(f"{folder}/builds.log", "a") as log:
        log.write(f"{os.getpid()}\\n")
    for number, ids in enumerate(real(*arguments)):
        if number == 5 and behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        yield ids
store.tokenise = observed
config = DataConfig(SourceConfig("text", f"{folder}/texts"), cache=f"{folder}/cache", validation=0.25)
print(open_store(config, "all", progress=False).digest)
"""


def start_builder(config: DataConfig, behaviour: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(Path(str(config.cache)).parent), behaviour]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_while_building_then_built_by_one_of_two(config: DataConfig, tmp_path: Path) -> None:
    killed = start_builder(config, "killed")
    killed.communicate()
    assert killed.returncode == -9
    assert list((tmp_path / "cache").glob(".*.unfinished"))
    builders = [start_builder(config, "whole") for _ in range(2)]
    answers = [builder.communicate() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0], answers
    assert len({output for output, _ in answers}) == 1
    builds = (tmp_path / "builds.log").read_text().split()
    assert builds[0] == str(killed.pid)
    assert len(builds) == 2
    assert answers[0][0].strip() == open_store(config, "all", progress=False).digest
    assert not list((tmp_path / "cache").glob(".*.unfinished"))


def test_worker_processes_keep_the_order() -> None:
    texts = TEXTS * 300  # several batches
    alone = list(tokenise(texts, byte_encoder(), 0, progress=False))
    together = list(tokenise(texts, byte_encoder(), 1, progress=False))
    assert len(alone) == len(together) == len(texts)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(alone, together, strict=True))


def test_the_bar_counts_documents_and_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    total = sum(len(ids) for ids in tokenise(TEXTS, byte_encoder(), 0, progress=True))
    assert f"12 documents, {total:,} tokens" in " ".join(capsys.readouterr().err.split())


def test_a_cache_is_never_read_as_text(config: DataConfig) -> None:
    inside = DataConfig(config.source, cache=f"{config.source.path}/cache")
    with pytest.raises(ValueError, match=r"cache=.* lies in the source folder"):
        open_store(inside, progress=False)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ATLAS_MEMORY_CACHE", raising=False)
    assert cache_folder(None) == tmp_path / "atlas-memory" / "data"
    monkeypatch.setenv("ATLAS_MEMORY_CACHE", "/elsewhere")
    assert cache_folder(None) == Path("/elsewhere")
    assert cache_folder("/given") == Path("/given")


def test_folders_are_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    for word in ("old", "new"):
        with replace_folder(target) as folder:
            (folder / "file").write_text(word)
    with pytest.raises(RuntimeError), replace_folder(target) as folder:
        (folder / "file").write_text("broken")
        raise RuntimeError
    assert (target / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
