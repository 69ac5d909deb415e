"""Prompt and score of the document tasks."""

from __future__ import annotations

import pytest

from atlas_memory.tasks.paper.completion import first_answer, prompt, score


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("Ida built it.", "Ida built it. It was built by"),
        ("Ida built it", "Ida built it. It was built by"),
        (" Ida built it... \n", "Ida built it. It was built by"),
        ("[DOC] [TLE] Mill[PAR]Ida built it.", "MillIda built it. It was built by"),
        ("Ida built it. it WAS built by", "Ida built it. It was built by"),
    ],
)
def test_prompt_is_the_document_and_the_sentence_to_complete(context: str, expected: str) -> None:
    assert prompt({"context": context, "question": " It was built by "}) == expected


def test_an_empty_question_leaves_the_document() -> None:
    assert prompt({"context": "Ida built it.", "question": ""}) == "Ida built it. "


@pytest.mark.parametrize(
    ("answers", "completion", "expected"),
    [
        (["Ida Holm"], " IDA holm, in 1820", 1.0),
        (["Ada", "Holm"], "by Holm", 1.0),
        (["Ida (a.k.a. Holm)"], "ida (a.k.a. holm)", 1.0),
        (["Ida"], "Ada", 0.0),
        ([" "], "anything", 0.0),
        ([], "anything", 0.0),
    ],
)
def test_score_is_whether_an_answer_is_contained(answers: list[str], completion: str, expected: float) -> None:
    assert score({"answers": answers}, [completion]) == {"contains": expected}


def test_first_answer() -> None:
    assert first_answer({"answers": ["Ida", "Holm"]}) == "Ida"
    assert first_answer({"answers": []}) == ""
