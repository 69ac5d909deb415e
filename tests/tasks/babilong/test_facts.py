"""Reading bAbI files."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas_memory.tasks.babilong.facts import Question, asked, measuring_files, read_stories, story_files

LINES = """1 Mary moved to the bathroom.
2 Where is Mary? \tbathroom\t1
3 John went to the hallway.
4 Mary went to the office.
5 Where is Mary? \toffice\t4
1 John went to the garden.
2 Where is John? \tgarden\t1
"""


def test_stories_questions_and_supports(tmp_path: Path) -> None:
    (tmp_path / "qa1.txt").write_text(LINES)
    first, second = read_stories(tmp_path / "qa1.txt")
    assert first.sentences[2] == "Mary went to the office." and len(second.sentences) == 1
    assert first.questions[1] == Question("Where is Mary?", "office", (2,), 3)
    assert [text for text, _ in first.lines()][1:4:2] == ["Where is Mary?", "Mary went to the office."]
    assert [len(question.sentences) for question in asked([first, second])] == [1, 3, 1]


def test_files_of_a_task(tmp_path: Path) -> None:
    for name in ("qa1_train.txt", "qa1_valid.txt", "qa10_valid.txt", "qa2_train.txt", "LICENSE.txt"):
        (tmp_path / name).write_text(LINES)
    assert [file.name for file in story_files(str(tmp_path), "qa1")] == ["qa1_train.txt", "qa1_valid.txt"]
    assert [file.name for file in measuring_files(str(tmp_path), "qa1")] == ["qa1_valid.txt"]
    assert [file.name for file in measuring_files(str(tmp_path), "qa2")] == ["qa2_train.txt"]
    assert len(measuring_files(f"{tmp_path}/qa1_*.txt", "qa1")) == 2
    with pytest.raises(ValueError, match="no file of qa3; accepted: names such as qa3_valid"):
        story_files(str(tmp_path), "qa3")
    with pytest.raises(ValueError, match="matches no file; accepted: a folder, a glob"):
        story_files(f"{tmp_path}/absent", "qa1")


def test_training_files_are_left_out_of_folders_in_a_list(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        for name in ("qa1_train.txt", "qa1_valid.txt"):
            (folder / name).write_text(LINES)
    valid = [first / "qa1_valid.txt", second / "qa1_valid.txt"]
    assert measuring_files(f"{first},{second}", "qa1") == measuring_files(f"{first}, {valid[1]}", "qa1") == valid
    named = second / "qa1_train.txt"  # by its own name, whether its folder is there or not
    assert measuring_files(f"{first},{named}", "qa1") == [valid[0], named]
    assert measuring_files(f"{second},{named}", "qa1") == [named, valid[1]]
    valid[0].unlink()
    assert measuring_files(f"{first},{second}", "qa1") == [valid[1]]


@pytest.mark.parametrize(
    "text",
    [
        "Mary moved.\n",
        "3 Mary moved.\n",
        "",
        "1 Where? \tx\t7\n",
        "1 Mary moved.\n3 Bill moved.\n",  # a line is missing
        "1 Mary moved.\n2 Where?\tx\t1\n2 Bill moved.\n",  # the first line of a story is
        "1 Mary moved.\n2 Where?\t\t1\n",
        "1 Ren\u00e9 moved.\n",  # not in UTF-8
    ],
)
def test_damaged_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "qa1.txt").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"qa1\.txt"):
        read_stories(tmp_path / "qa1.txt")
