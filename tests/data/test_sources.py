from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import zstandard

from atlas_memory.data import EmptySourceError, SourceConfig, read_documents
from atlas_memory.data.sources import open_source
from tests.conftest import SHARED

ROWS = [{"text": "one", "number": 1}, {"text": "two\n", "number": 2}, {"text": "", "number": 3}, {"text": "vier"}]


def texts(kind: str, path: Path | str | None = None, **fields: Any) -> list[str]:
    config = SourceConfig(kind, None if path is None else str(path), **fields)
    return [document.text for document in read_documents(config)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    for name, content in {
        "b.md": "# b",
        "a.txt": "a\r\nä",
        "deep/c.PY": "c = 1",
        "image.png": "no",
        ".hidden/d.txt": "no",
        "empty.txt": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
    return root


def test_folders_globs_and_files(folder: Path) -> None:
    assert texts("text", folder) == ["a\r\nä", "# b", "c = 1"]
    assert [d.name for d in read_documents(SourceConfig("text", str(folder)))] == ["a.txt", "b.md", "deep/c.PY"]
    assert texts("text", folder, suffixes=(".md",)) == ["# b"]
    assert texts("text", folder / "**" / "*.[mP]*") == ["# b", "c = 1"]
    assert texts("text", folder / "image.png") == ["no"]
    assert texts("text", folder, limit=1) == ["a\r\nä"]


def test_bytes_that_are_no_text(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"a\.txt: byte 2 is not UTF-8; .*encoding_errors='replace'"):
        texts("text", folder)
    assert texts("text", folder, encoding_errors="replace")[0] == "ab�"


def write_lines(path: Path, lines: list[str]) -> Path:
    content = "\n".join(lines).encode()
    compress = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
    path.write_bytes(compress(content))
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps(row) for row in ROWS]
    path = write_lines(tmp_path / f"rows.jsonl{suffix}", [*lines[:2], "  ", *lines[2:]])
    assert texts("jsonl", path) == ["one", "two\n", "vier"]
    assert [d.name for d in read_documents(SourceConfig("jsonl", str(tmp_path)))][-1] == f"rows.jsonl{suffix}:5"
    with pytest.raises(ValueError, match=r"line 1: field='body' is missing; fields here: 'text', 'number'"):
        texts("jsonl", path, field="body")
    with pytest.raises(ValueError, match=r"line 1: field='number' holds int; it must hold text"):
        texts("jsonl", path, field="number")


def test_lines_that_are_not_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2: not JSON"):
        texts("jsonl", write_lines(tmp_path / "a.jsonl", ['{"text": "a"}', "{"]))
    with pytest.raises(ValueError, match="line 1: list instead of an object with the field 'text'"):
        texts("jsonl", write_lines(tmp_path / "b.jsonl", ["[]"]))
    half = write_lines(tmp_path / "c.jsonl", ['{"text": "a\\ud83d"}', '{"text": "\\ud83d\\ude42"}'])
    with pytest.raises(ValueError, match="line 1: half of a surrogate pair at character 1"):
        texts("jsonl", half)
    assert texts("jsonl", half, encoding_errors="replace") == ["a�", "🙂"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_datasets_from_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, streaming: bool
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    {".jsonl": data.to_json, ".parquet": data.to_parquet, ".csv": data.to_csv}[suffix](str(tmp_path / f"rows{suffix}"))
    assert texts("datasets", tmp_path / f"rows{suffix}", streaming=streaming) == ["one", "two"]
    if not streaming:  # a stream that is left half-way keeps its file open
        with pytest.raises(ValueError, match=r"row 0: field='body' is missing; fields here: 'text'"):
            texts("datasets", tmp_path / f"rows{suffix}", field="body")


def test_datasets_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    one, two = (datasets.Dataset.from_list([{"text": word}]) for word in ("one", "two"))
    one.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=one, test=two).save_to_disk(str(tmp_path / "splits"))
    assert texts("datasets", tmp_path / "saved") == ["one"]
    assert texts("datasets", tmp_path / "splits", split="test") == ["two"]
    with pytest.raises(ValueError, match="split='dev' is not a choice; allowed: train, test"):
        texts("datasets", tmp_path / "splits", split="dev")
    (tmp_path / "plain").mkdir()
    two.to_parquet(str(tmp_path / "plain" / "test.parquet"))
    assert texts("datasets", tmp_path / "plain", split="test") == ["two"]
    (tmp_path / "rows.pdf").write_text("")
    with pytest.raises(ValueError, match=r"suffix of path='\.pdf' is not a choice"):
        texts("datasets", tmp_path / "rows.pdf")


def test_missing_libraries_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "zstandard"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match=r"datasets needs datasets: pip install 'atlas-memory\[data\]'"):
        texts("datasets", "some/name")
    with pytest.raises(ImportError, match=r"\.zst files needs zstandard: pip install"):
        texts("jsonl", write_lines(tmp_path / "a.jsonl.zst", ["{}"]))


def test_empty_sources_are_errors(tmp_path: Path) -> None:
    with pytest.raises(EmptySourceError, match=r"matches no file ending in \.jsonl"):
        texts("jsonl", tmp_path)
    with pytest.raises(EmptySourceError, match="matches no file; accepted: a file, a folder or a glob"):
        texts("text", tmp_path / "*.txt")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(EmptySourceError, match="has no document with any text"):
        texts("text", tmp_path)


def test_splits_share_no_document_and_lose_none(tmp_path: Path) -> None:
    for number in range(23):
        (tmp_path / f"{number:02}.txt").write_text(str(number))
    config = SourceConfig("text", str(tmp_path))
    parts = {split: [d.text for d in read_documents(config, split, 0.2)] for split in ("train", "validation", "all")}
    assert sorted(parts["train"] + parts["validation"]) == sorted(parts["all"])
    assert parts["validation"] == ["4", "9", "14", "19"]
    with pytest.raises(EmptySourceError, match=r"validation=0.01 leaves no document of 23 .* at least 0.0435"):
        list(read_documents(config, "validation", 0.01))
    with pytest.raises(ValueError, match="split='test' is not a choice; allowed: train, validation, all"):
        list(read_documents(config, "test"))


def test_descriptions_change_with_the_files(folder: Path) -> None:
    config = SourceConfig("text", str(folder))
    before = open_source(config).description()
    assert open_source(config).description() == before
    (folder / "b.md").write_text("# other")
    assert open_source(config).description() != before
    json.dumps([before, open_source(SourceConfig("datasets", str(folder))).description()])


@pytest.mark.shared
def test_the_novels() -> None:
    novels = list(read_documents(SourceConfig.parse(str(SHARED / "data" / "books"))))
    assert len(novels) == 40
    assert min(len(novel.text) for novel in novels) > 10_000
