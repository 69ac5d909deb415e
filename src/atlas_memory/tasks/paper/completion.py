"""Prompt and score of the tasks that ask about a document: the YAML files of `harness/` name these functions.

A row has `context`, `question` (the beginning of a sentence that the answer completes) and `answers`.
"""

from __future__ import annotations

import re
from typing import Any

# TriviaQA's files separate titles, documents and paragraphs by these; no model was trained to read them.
PASSAGE_MARK = re.compile(r"\[(?:PAR|DOC|TLE)\]")


def prompt(row: dict[str, Any]) -> str:
    """The document, a full stop, and the sentence to complete."""
    question = row["question"].strip()
    document = PASSAGE_MARK.sub("", row["context"]).strip()
    # Some public rows repeat the question at the end of the document: it is asked once.
    while question and document.lower().endswith(question.lower()):
        document = document[: -len(question)].rstrip()
    return f"{document.strip('.')}. {question}"


def first_answer(row: dict[str, Any]) -> str:
    """The answer a reader sees beside the prompt."""
    return next(iter(row["answers"]), "")


def score(row: dict[str, Any], completions: list[str]) -> dict[str, float]:
    """1 where the completion contains any of the answers, whatever their case."""
    completion = completions[0].lower()
    answers = [answer.strip().lower() for answer in row["answers"]]
    # An empty answer would be contained in everything.
    return {"contains": float(any(answer and answer in completion for answer in answers))}
