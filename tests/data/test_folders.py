"""Folders that are replaced: the old one or the new one, whatever happens in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas_memory.data.folders import recover, replace_folder, set_aside, unfinished


class Killed(BaseException):
    """Stands for the end of the process: nothing after it does anything."""


def write(target: Path, word: str) -> None:
    with replace_folder(target) as folder:
        (folder / "file").write_text(word)


def refuse(monkeypatch: pytest.MonkeyPatch, refused: list[Path], error: BaseException) -> None:
    """Renaming any of these paths fails."""
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path in refused:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)


def test_a_new_folder_that_cannot_be_named_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "folder"
    write(target, "old")
    refuse(monkeypatch, [unfinished(target)], OSError("no"))
    with pytest.raises(OSError, match="no"):
        write(target, "new")
    assert (target / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def killed_between(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old folder has lost its name, the new one has not got it, and nothing could be put right."""
    write(target, "old")
    with monkeypatch.context() as patch:
        refuse(patch, [unfinished(target), set_aside(target)], Killed())
        with pytest.raises(Killed):
            write(target, "new")
    assert not target.exists()


def test_the_old_folder_is_recovered_by_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "folder"
    killed_between(target, monkeypatch)
    recover(target)
    assert (target / "file").read_text() == "old"
    recover(target)  # where there is nothing to recover, nothing happens
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_old_folder_is_recovered_by_the_next_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "folder"
    killed_between(target, monkeypatch)
    with pytest.raises(RuntimeError), replace_folder(target):
        raise RuntimeError  # fails at its own work, and the old one is there all the same
    assert (target / "file").read_text() == "old"
    write(target, "new")
    assert (target / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_was_set_aside_goes_once_the_new_folder_is_there(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    write(target, "new")
    set_aside(target).mkdir()
    recover(target)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
