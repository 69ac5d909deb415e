"""Documents to learn from: every question in place, loss on answers, segments that resume."""

from __future__ import annotations

import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atlas_memory.data import IGNORED, DataConfig, ExerciseConfig, Loader, RowsConfig, SegmentRows, make_loader
from atlas_memory.data.tokenizers import byte_tokenizer
from atlas_memory.tasks.babilong.solver import Solver
from atlas_memory.tasks.babilong.stories import simulate
from atlas_memory.tasks.babilong.training import Babilong, TrainingConfig, document_lines
from atlas_memory.tasks.background import open_background
from atlas_memory.tasks.lines import LineLessons

TOKENIZER = byte_tokenizer()
ROWS = RowsConfig(kind="segments", batch=3, length=200)


def lessons(**options: object) -> LineLessons:
    return Babilong({"tasks": ("qa1", "qa5"), "lengths": (0, 300), **options}).lessons(TOKENIZER)


def rows(**options: object) -> SegmentRows:
    return SegmentRows(lessons(**options), ROWS)


def test_all_questions_of_a_story_are_asked_in_place() -> None:
    story = simulate("qa2", 1)
    lines = list(document_lines(story, 2000, open_background(), "0"))
    assert [line.answer for line in lines if line.answer] == [f" {question.answer}." for question in story.questions]
    assert lines[-1].text.strip() == story.questions[-1].text
    solver = Solver()
    for line in lines:
        if line.answer:
            assert line.answer == f" {solver.answer(line.text).text}."
        elif line.text.strip() in story.sentences:
            solver.tell(line.text)


def test_more_questions_count_after_every_sentence_from_which_anything_is_known() -> None:
    story = simulate("qa4", 3)
    told = list(document_lines(story, 0, open_background(), "0", more_questions=3))
    asked = [bool(line.answer) for line in told]
    assert asked == [False, *[True] * 3, False, *[True] * 3, True]
    assert sum(bool(line.answer) for line in document_lines(story, 0, open_background(), "0", 2.5)) in (5, 6, 7)


@pytest.mark.parametrize("task", ["qa1", "qa2", "qa3", "qa4", "qa5"])
def test_more_questions_are_answered_by_what_is_known(task: str) -> None:
    solver, asked = Solver(), 0
    story = simulate(task, 3)
    for line in document_lines(story, 0, open_background(), "0", more_questions=1.0):
        if not line.answer:
            solver.tell(line.text)
            continue
        assert line.answer[1:-1] in [answer.text for answer in solver.answers(line.text.strip())]
        asked += 1
    assert asked > 2 * len(story.questions)


@pytest.mark.parametrize("task", ["qa1", "qa2", "qa4"])
def test_further_questions_do_not_repeat_what_the_lines_before_answered(task: str) -> None:
    story = simulate(task, 3)
    made = document_lines(story, 0, open_background(), "0", 5.0, 10)
    lines = [line._replace(text=line.text.strip()) for line in made]
    own = [question.text for question in story.questions]
    for place, line in enumerate(lines):
        if line.answer and line.text not in own:
            assert line not in lines[max(0, place - 10) : place]


def test_targets_are_the_answers_shifted_by_one() -> None:
    document = lessons(tasks=("qa1",), lengths=(300,)).document(0)
    asked = np.flatnonzero(document.targets != IGNORED)
    np.testing.assert_array_equal(document.targets[asked], document.tokens[asked + 1])
    said = str(TOKENIZER.decode(document.targets[asked].tolist()))
    assert said.count(".") == 5 and said.startswith(" ")
    assert document.tokens[-1] == TOKENIZER.eos_token_id


def test_the_background_is_all_but_the_story() -> None:
    made = lessons(tasks=("qa2",), lengths=(600,))
    document = made.document(0)
    story = "".join(line.text + line.answer for line in made.exercise.lines(0) if line.told)
    kept = document.tokens[~document.background]
    assert str(TOKENIZER.decode(kept[:-1].tolist())) == story
    assert kept[-1] == TOKENIZER.eos_token_id
    assert 0.5 < document.background.mean() < 0.95


def test_segments_join_to_documents_and_count_their_targets() -> None:
    made, documents = rows(), lessons()
    numbers = [0, 1, 2]  # of each row its document, and the (token, target, background) of it so far
    reading: list[list[tuple[int, int, bool]]] = [[], [], []]
    read: dict[int, list[tuple[int, int, bool]]] = {}
    for batch in itertools.islice(Loader(made), 40):
        assert batch.target_count == int((batch.targets != IGNORED).sum())
        for row, real in enumerate(batch.lengths.tolist()):
            if batch.fresh[row] and batch.index:
                read[numbers[row]] = reading[row]  # that document is over
                numbers[row], reading[row] = max(numbers) + 1, []
            parts = (batch.input_ids, batch.targets, batch.background)
            reading[row] += zip(*(part[row, :real].tolist() for part in parts), strict=True)
            assert not batch.background[row, real:].any()
    assert len(read) > 10 and sum(len(document) > ROWS.length for document in read.values()) > 3
    for number, document in read.items():
        assert document == list(zip(*(part.tolist() for part in documents.document(number)), strict=True))


def test_resumes_exactly_and_for_any_number_of_ranks() -> None:
    loader = Loader(rows())
    for _ in range(3):
        next(loader)
    state = loader.state_dict()
    expected = next(loader)
    resumed = rows()
    resumed.load_state_dict(state)
    shares = [resumed.read(rank, 2) for rank in range(2)]
    assert torch.equal(shares[0].input_ids, expected.input_ids[0::2])
    assert torch.equal(shares[1].targets, expected.targets[1::2])
    with pytest.raises(ValueError, match="state is of other rows"):
        rows(seed=1).load_state_dict(state)
    copied = pickle.loads(pickle.dumps(resumed))  # as to a worker process
    assert torch.equal(copied.read().input_ids, expected.input_ids)


def test_facts_of_files(tmp_path: Path) -> None:
    (tmp_path / "qa1_train.txt").write_text("1 Mary moved to the office.\n2 Where is Mary?\toffice\t1\n")
    document = lessons(tasks=["qa1"], lengths=[0], facts=str(tmp_path)).document(0)
    assert TOKENIZER.decode(document.tokens[:-1].tolist()) == "Mary moved to the office. Where is Mary? office."
    with pytest.raises(ValueError, match="has no file of qa2; accepted: names such as qa2_valid"):
        lessons(tasks=("qa2",), facts=str(tmp_path))


def story(place: str) -> str:
    return f"1 Mary moved to the {place}.\n2 Where is Mary?\t{place}\t1\n"


def texts(facts: Path, split: str, count: int = 200) -> set[str]:
    exercise = Babilong({"tasks": ["qa1"], "lengths": [0], "facts": str(facts)}, split)
    return {exercise.text(number).partition(".")[0].split()[-1] for number in range(count)}


def test_stories_of_files_are_learned_from_or_measured_with(tmp_path: Path) -> None:
    places = [f"room{number}" for number in range(25)]
    (tmp_path / "qa1_a.txt").write_text("".join(map(story, places[:13])))
    (tmp_path / "qa1_b.txt").write_text("".join(map(story, places[13:])))
    assert texts(tmp_path, "validation") == {"room9", "room19"}
    assert texts(tmp_path, "train", 1000) == set(places) - {"room9", "room19"}
    assert texts(tmp_path, "all", 1000) == set(places)


def test_too_few_stories_to_hold_some_out(tmp_path: Path) -> None:
    (tmp_path / "qa1.txt").write_text("".join(story(f"room{number}") for number in range(9)))
    assert len(texts(tmp_path, "train")) == 9
    with pytest.raises(
        ValueError, match=r"has 9 stories of qa1: too few to hold out every 10th for split='validation'"
    ):
        texts(tmp_path, "validation")


def test_lessons_are_the_same_where_their_files_are(tmp_path: Path) -> None:
    def digest(folder: str) -> str:
        files = {"facts": str(tmp_path / folder / "qa1.txt"), "background": str(tmp_path / folder / "book.txt")}
        return lessons(tasks=["qa1"], **files).digest

    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "qa1.txt").write_text(story("office"))
        (tmp_path / folder / "book.txt").write_text("A long and tedious winter it was, without any doubt.\n")
    expected = digest("one")
    assert digest("other") == expected
    for name in ("qa1.txt", "book.txt"):
        file = tmp_path / "other" / name
        content = file.read_text()
        file.write_text(content.replace("o", "u"))
        assert digest("other") != expected
        file.write_text(content)
    assert digest("other") == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "qa1"}, "tasks='qa1' must be a list of one or more, such as [qa1, qa2]"),
        ({"tasks": ()}, "tasks=() must be a list"),
        ({"lengths": 4000}, "lengths=4000 must be a list"),
        ({"lengths": ()}, "lengths=() must be a list"),
        ({"lengths": ["4k"]}, "length in lengths='4k' must be a whole number"),
        ({"stages": 5}, "stages=5 must be a list such as [{from: 1000, lengths: [0, 4000]}]"),
        ({"stages": [[5, [0]]]}, "stages=[[5, [0]]] must be a list such as"),
        ({"stages": [{"lengths": [0]}]}, "must be a list such as [{from:"),
        ({"stages": [{"from": 5, "lengths": 4000}]}, "lengths=4000 must be a list"),
        ({"stages": [{"from": "5", "lengths": [0]}]}, "from in stages='5' must be a whole number"),
        ({"stages": [{"from": 5, "seed": 1}]}, "option of a stage='seed' is not a choice; allowed: from, tasks"),
        ({"stages": [{"from": 5, "tasks": ["qa0"]}]}, "task='qa0'"),
        ({"stages": [{"from": 5, "stories": 2}, {"from": 3, "stories": 3}]}, "with rising numbers"),
        ({"stages": [{"from": 5, "stories": 2}, {"from": 5, "stories": 3}]}, "with rising numbers"),
        ({"apart": -1}, "apart=-1 must be a whole number"),
        ({"stories": 0}, "stories=0 must be a whole number"),
        ({"more_questions": "x"}, "more_questions='x' must be a number of at least 0"),
        ({"more_questions": None}, "more_questions=None must be a number of at least 0"),
        ({"more_questions": True}, "more_questions=True must be a number of at least 0"),
        ({"facts": 5}, "facts=5 must be a word or a path"),
        ({"background": None}, "background=None must be a word or a path"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
    ],
)
def test_errors_name_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Babilong(options)


def test_choices_are_checked() -> None:
    with pytest.raises(ValueError, match="task='qa0'"):
        TrainingConfig(tasks=("qa0",))
    with pytest.raises(ValueError, match="length in lengths=-1"):
        TrainingConfig(lengths=(-1,))
    with pytest.raises(ValueError, match="from in stages=-1"):
        TrainingConfig(stages=({"from": -1, "lengths": (0,)},))
    with pytest.raises(ValueError, match=r"more_questions=-1\.5 must be a number of"):
        TrainingConfig(more_questions=-1.5)
    with pytest.raises(ValueError, match="option of babilong='length' is not a choice; allowed: tasks, lengths"):
        lessons(length=0)
    with pytest.raises(ValueError, match="epochs=1 must be None: exercises have no end"):
        SegmentRows(lessons(), RowsConfig(kind="segments", epochs=1))


def test_stages_change_documents_and_stay() -> None:
    stages = ({"from": 2, "lengths": [100, 200]}, {"from": 5, "tasks": ["qa1"], "more_questions": 2, "stories": 3})
    config = TrainingConfig(tasks=("qa4",), lengths=(0,), stages=stages)
    assert [config.at(number).lengths for number in (0, 1, 2, 5)] == [(0,), (0,), (100, 200), (100, 200)]
    assert [config.at(number).tasks for number in (0, 4, 5, 99)] == [("qa4",), ("qa4",), ("qa1",), ("qa1",)]
    assert (config.at(4).more_questions, config.at(5).more_questions, config.at(5).stories) == (0, 2, 3)
    made = lessons(tasks=["qa1"], stages=[{"from": 1, "lengths": [2000]}], lengths=[0])
    assert made.length(0) < 2000 < made.length(1)
    made = lessons(tasks=["qa4"], stages=[{"from": 1, "tasks": ["qa1"]}], lengths=[0])
    assert "north" in made.exercise.text(0) or "east" in made.exercise.text(0) or "west" in made.exercise.text(0)
    assert "Where is" in made.exercise.text(1)


def test_stories_follow_one_another_and_the_latest_holds() -> None:
    exercise = Babilong({"tasks": ["qa4"], "lengths": [0], "stories": 5, "more_questions": 1})
    for number in range(20):
        lines = list(exercise.lines(number))
        told = [line.text for line in lines if not line.answer]
        assert len(told) == 10
        solver = Solver()
        for line in lines:
            if line.answer:
                assert line.answer == f" {solver.answer(line.text).text}."
            else:
                solver.tell(line.text)


def test_validation_has_other_stories() -> None:
    exercises = [Babilong({"tasks": ["qa1"], "lengths": [0]}, split) for split in ("train", "validation")]
    trained, measured = ({exercise.text(number) for number in range(50)} for exercise in exercises)
    assert len(trained) == len(measured) == 50 and not trained & measured


def test_a_loader_finds_the_exercise_by_its_name() -> None:
    exercise = ExerciseConfig("babilong", options={"tasks": ["qa1", "qa5"], "lengths": [0, 300]})
    loader = make_loader(DataConfig(exercises=(exercise,), rows=ROWS), progress=False)
    assert torch.equal(next(loader).input_ids, rows().read().input_ids)
    with pytest.raises(ValueError, match=r"exercise='babylong' is not a choice; allowed: .*babilong"):
        make_loader(DataConfig(exercises=(ExerciseConfig("babylong"),), rows=ROWS), progress=False)
