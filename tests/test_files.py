"""The file: the old one or the new one, never a part."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atlas_memory.files import check_output, check_output_folder, digest_of, finite, read_tensors, write_json


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scores.json"
    write_json(path, {"run": 1})

    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_json(path, {"run": 2})
    assert json.loads(path.read_text()) == {"run": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_json_has_only_finite_numbers(tmp_path: Path) -> None:
    content = {"loss": [math.nan, 1.5], "perplexity": {"all": math.inf}, "name": "nan"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "out.json", content)
    assert finite(content) == {"loss": [None, 1.5], "perplexity": {"all": None}, "name": "nan"}


def test_where_a_file_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder\. It should be the file to write"):
        check_output(tmp_path)
    with pytest.raises(ValueError, match=r"the folder '.*absent' does not exist"):
        check_output(tmp_path / "absent" / "scores.json")


def test_where_a_folder_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(ValueError, match=r"file' is a file\. It should be a folder"):
            check_output_folder(path)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, tmp_path / "new" / "below", Path("new")):
        check_output_folder(path)


def test_a_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "a.txt").write_text("1")
        (folder / "b.txt").write_text("2")
    one, other = (sorted(folder.iterdir()) for folder in folders)
    assert digest_of(one) == digest_of(other) != digest_of(one[::-1])
    other[0].write_text("3")  # of the same size
    assert digest_of(one) != digest_of(other)


def test_tensors_of_a_file_lie_where_torch_puts_its_own(tmp_path: Path) -> None:
    """At any other address a product may be summed in another order."""
    tensors = {str(size): torch.randn(size) for size in range(1, 12)}
    save_file(tensors, tmp_path / "tensors", metadata={"format": "pt"})
    metadata, read = read_tensors(tmp_path / "tensors")
    assert metadata == {"format": "pt"}
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert {tensor.data_ptr() % 64 for tensor in read.values()} == {torch.empty(1).data_ptr() % 64}
