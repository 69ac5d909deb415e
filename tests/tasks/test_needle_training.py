"""Needles to learn from: hidden in order, asked for by their words, loss on the values alone."""

from __future__ import annotations

import re

import numpy as np
import pytest

from atlas_memory.data import IGNORED, DataConfig, ExerciseConfig, RowsConfig, make_loader
from atlas_memory.data.tokenizers import byte_tokenizer
from atlas_memory.tasks.background import open_background
from atlas_memory.tasks.lengths import characters_of
from atlas_memory.tasks.needle import NOISE, TASKS, needle_sample
from atlas_memory.tasks.needle_training import MOST, NeedleOptions, Needles, document_lines

TOKENIZER = byte_tokenizer()
NEEDLE = re.compile(r"One of the special magic (?:numbers|uuids) for ([\w-]+) is: ([\w-]+)\.")
ASKED = re.compile(r"for ([\w-]+) is:$")


@pytest.mark.parametrize("needles", [1, 2, 5])
@pytest.mark.parametrize("task", TASKS)
def test_every_needle_is_asked_for_by_its_word(task: str, needles: int) -> None:
    lines = list(document_lines(task, needles, 1500, open_background(), "0"))
    hidden = dict(found.groups() for line in lines if (found := NEEDLE.fullmatch(line.text.strip())))
    asked = {found[1]: line.answer for line in lines if (found := ASKED.search(line.text))}
    assert len(hidden) == needles and asked == {word: f" {value}." for word, value in hidden.items()}
    assert all(line.answer for line in lines[-needles:])
    assert len("".join(line.text + line.answer for line in lines)) <= characters_of(1500)


def test_what_is_learned_from_reads_as_what_is_measured() -> None:
    """One needle in a text is a sample of the evaluation with its answer."""
    lines = [line.text.strip() for line in document_lines("single_2", 1, 600, open_background(), "0")]
    measured = [piece.strip() for piece in needle_sample("single_2", 0, 600, 0.5, open_background()).pieces()]
    for place in (0, -1):
        assert re.sub(r"for [\w]+-[\w]+", "for X", lines[place]) == re.sub(r"for [\w]+-[\w]+", "for X", measured[place])
    assert sum(map(bool, map(NEEDLE.fullmatch, lines))) == sum(map(bool, map(NEEDLE.fullmatch, measured))) == 1


def test_haystacks_and_what_is_background() -> None:
    lines = list(document_lines("single_1", 2, 800, open_background(), "0"))
    assert {line.text.strip() for line in lines if not line.told} == set(NOISE)
    assert [line.told for line in lines].count(True) == 1 + 2 + 2
    lines = list(document_lines("single_3", 2, 800, open_background(), "0"))
    assert not {line.text.strip() for line in lines if not line.told} & set(NOISE)


def test_loss_is_on_the_values_alone() -> None:
    exercise = Needles({"tasks": ["single_1"], "lengths": [300], "needles": 3})
    document = exercise.lessons(TOKENIZER).document(4)
    said = str(TOKENIZER.decode(document.targets[document.targets != IGNORED].tolist()))
    answers = [line.answer for line in exercise.lines(4) if line.answer]
    assert said == "".join(answers) and len(answers) <= 3
    assert not np.any(document.background & (document.targets != IGNORED))


def test_documents_differ_in_how_many_needles_they_have_and_stages_change_them() -> None:
    exercise = Needles({"needles": 1, "stages": [{"from": 10, "needles": 3, "tasks": ["single_2"]}]})
    asked = [sum(bool(line.answer) for line in exercise.lines(number)) for number in range(40)]
    assert set(asked[:10]) == {1} and set(asked[10:]) == {1, 2, 3}
    assert exercise.text(12) == exercise.text(12) != exercise.text(13)
    assert exercise.text(12) != Needles({}, "validation").text(12)


def test_a_loader_finds_the_exercise_by_its_name() -> None:
    exercise = ExerciseConfig("needles", options={"lengths": [200], "needles": 2})
    rows = RowsConfig(kind="segments", batch=2, length=100)
    batch = next(make_loader(DataConfig(exercises=(exercise,), rows=rows), progress=False))
    assert batch.input_ids.shape == (2, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needles": 0}, "needles=0"),
        ({"needles": MOST + 1}, f"needles={MOST + 1} must be at most {MOST}"),
        ({"tasks": ("qa1",)}, "task='qa1' is not a choice; allowed: single_1"),
        ({"stages": ({"from": 1, "needles": 0},)}, "needles=0"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeedleOptions(**options)
    with pytest.raises(ValueError, match="option of needles='needle' is not a choice"):
        Needles({"needle": 1})
