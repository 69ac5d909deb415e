"""Documents to learn from: every question in place, loss on answers, segments that resume."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from atlas_memory.data import IGNORED, DataConfig, ExerciseConfig, Loader, RowsConfig, SegmentRows, make_loader
from atlas_memory.data.tokenizers import byte_tokenizer
from atlas_memory.tasks.babilong.solver import Solver
from atlas_memory.tasks.babilong.stories import simulate
from atlas_memory.tasks.babilong.training import Babilong, BabilongLessons, TrainingConfig, document_lines
from atlas_memory.tasks.background import open_background

TOKENIZER = byte_tokenizer()
ROWS = RowsConfig(kind="segments", batch=3, length=200)


def lessons(**options: object) -> BabilongLessons:
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


@pytest.mark.parametrize("task", ["qa1", "qa2", "qa3", "qa4", "qa5"])
def test_more_questions_are_answered_by_what_is_known(task: str) -> None:
    solver, asked = Solver(), 0
    for line in document_lines(simulate(task, 3), 0, open_background(), "0", more_questions=1.0):
        if not line.answer:
            solver.tell(line.text)
            continue
        assert line.answer[1:-1] in [answer.text for answer in solver.answers(line.text.strip())]
        asked += 1
    assert asked > 2 * len(simulate(task, 3).questions)


def test_targets_are_the_answers_shifted_by_one() -> None:
    document = lessons(tasks=("qa1",), lengths=(300,)).document(0)
    asked = np.flatnonzero(document.targets != IGNORED)
    np.testing.assert_array_equal(document.targets[asked], document.tokens[asked + 1])
    said = str(TOKENIZER.decode(document.targets[asked].tolist()))
    assert said.count(".") == 5 and said.startswith(" ")
    assert document.tokens[-1] == TOKENIZER.eos_token_id


def test_segments_join_to_documents_and_count_their_targets() -> None:
    made, documents = rows(), lessons()
    joined: list[list[int]] = [[], [], []]
    for batch in itertools.islice(Loader(made), 12):
        assert batch.target_count == int((batch.targets != IGNORED).sum())
        for row, (ids, real) in enumerate(zip(batch.input_ids, batch.lengths, strict=True)):
            if batch.fresh[row] and batch.index:
                continue_from = joined[row]
                assert continue_from  # the document before is over
                joined[row] = [-1]
            if joined[row][:1] != [-1]:
                joined[row] += ids[:real].tolist()
        if all(row[:1] == [-1] for row in joined):
            break
        for row in range(3):
            if joined[row][:1] != [-1]:
                assert joined[row] == documents.document(row).tokens[: len(joined[row])].tolist()


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
    with pytest.raises(ValueError, match="has no file of qa2, such as qa2_train"):
        lessons(tasks=("qa2",), facts=str(tmp_path))


def test_choices_are_checked() -> None:
    with pytest.raises(ValueError, match="task='qa0'"):
        TrainingConfig(tasks=("qa0",))
    with pytest.raises(ValueError, match="length=-1"):
        TrainingConfig(lengths=())
    with pytest.raises(ValueError, match="document number in stages=-1"):
        TrainingConfig(stages=((-1, (0,)),))
    with pytest.raises(ValueError, match=r"more_questions=1\.5 must lie between"):
        TrainingConfig(more_questions=1.5)
    with pytest.raises(ValueError, match="option of babilong='length' is not a choice; allowed: tasks, lengths"):
        lessons(length=0)
    with pytest.raises(ValueError, match="epochs=1 must be None: exercises have no end"):
        SegmentRows(lessons(), RowsConfig(kind="segments", epochs=1))


def test_stages_make_documents_longer() -> None:
    config = TrainingConfig(lengths=(0,), stages=((2, (100, 200)), (5, (1000,))))
    assert [config.lengths_at(number) for number in (0, 1, 2, 4, 5, 99)] == [
        (0,), (0,), (100, 200), (100, 200), (1000,), (1000,),
    ]  # fmt: skip
    made = lessons(tasks=["qa1"], stages=[[1, [2000]]], lengths=[0])
    assert made.length(0) < 2000 < made.length(1)


def test_validation_has_other_stories() -> None:
    options = {"tasks": ["qa1"], "lengths": [0]}
    assert Babilong(options, "train").text(0) != Babilong(options, "validation").text(0)


def test_a_loader_finds_the_exercise_by_its_name() -> None:
    exercise = ExerciseConfig("babilong", options={"tasks": ["qa1", "qa5"], "lengths": [0, 300]})
    loader = make_loader(DataConfig(exercises=(exercise,), rows=ROWS), progress=False)
    assert torch.equal(next(loader).input_ids, rows().read().input_ids)
    with pytest.raises(ValueError, match=r"exercise='babylong' is not a choice; allowed: .*babilong"):
        make_loader(DataConfig(exercises=(ExerciseConfig("babylong"),), rows=ROWS), progress=False)
