"""The language of bAbI's first ten tasks: its words, its sentences, and what each of them says.

A sentence becomes an `Event`, a question a `Query`; `stories` writes them and `solver` reads them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Verbs that mean the same; one of them is drawn for each sentence.
MOVED = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
TOOK = ("got", "picked up", "grabbed", "took")
DROPPED = ("dropped", "left", "put down", "discarded")
GAVE = ("gave", "handed", "passed")
ABSENT = ("is no longer in", "is not in")

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
NUMBERS = ("none", "one", "two", "three")
NOTHING = "nothing"


class Event(NamedTuple):
    """What a sentence says: `kind` is one of moved, took, dropped, gave, present, absent, either, lies."""

    kind: str
    subject: str  # a person; lies: a place
    first: str = ""  # a place or an object; lies: a direction
    second: str = ""  # gave: who received; either: the other place; lies: the place it is measured from


class Query(NamedTuple):
    """What a question asks: `kind` is a key of `QUESTIONS`; the rest are the words it mentions, in order."""

    kind: str
    words: tuple[str, ...]


_WORD = r"(\w+)"


def _any(verbs: tuple[str, ...]) -> str:
    return f"(?:{'|'.join(verbs)})"


_SENTENCES = {
    "moved": rf"{_WORD} {_any(MOVED)} the {_WORD}\.",
    "took": rf"{_WORD} {_any(TOOK)} the {_WORD}(?: there)?\.",
    "dropped": rf"{_WORD} {_any(DROPPED)} the {_WORD}(?: there)?\.",
    "gave": rf"{_WORD} {_any(GAVE)} the {_WORD} to {_WORD}\.",
    "present": rf"{_WORD} is in the {_WORD}\.",
    "absent": rf"{_WORD} {_any(ABSENT)} the {_WORD}\.",
    "either": rf"{_WORD} is either in the {_WORD} or the {_WORD}\.",
    "lies": rf"The {_WORD} is {_WORD} of the {_WORD}\.",
}

QUESTIONS = {
    "person": "Where is {}?",
    "object": "Where is the {}?",
    "before": "Where was the {} before the {}?",
    "what lies": "What is {} of the {}?",
    "lies of what": "What is the {} {} of?",
    "what given": "What did {} give to {}?",
    "who gave to": "Who gave the {} to {}?",
    "given to whom": "Who did {} give the {} to?",
    "who gave": "Who gave the {}?",
    "who received": "Who received the {}?",
    "whether in": "Is {} in the {}?",
    "how many": "How many objects is {} carrying?",
    "what carried": "What is {} carrying?",
}

_READ_SENTENCES = {kind: re.compile(pattern) for kind, pattern in _SENTENCES.items()}
_READ_QUESTIONS = {
    kind: re.compile(re.escape(form).replace(r"\{\}", _WORD).replace(r"\?", r"\s?\?"))
    for kind, form in QUESTIONS.items()
}


def read_sentence(text: str) -> Event:
    """`Mary got the milk there.` → Event("took", "Mary", "milk")."""
    for kind, pattern in _READ_SENTENCES.items():
        if found := pattern.fullmatch(text.strip()):
            return Event(kind, *found.groups())
    raise ValueError(f"sentence={text!r} is none of the forms of bAbI's tasks 1 to 10, such as 'Mary got the milk.'.")


def read_question(text: str) -> Query:
    """`Where is Mary?` → Query("person", ("Mary",))."""
    for kind, pattern in _READ_QUESTIONS.items():
        if found := pattern.fullmatch(text.strip()):
            return Query(kind, found.groups())
    raise ValueError(f"question={text!r} is none of the forms of bAbI's tasks 1 to 10, such as 'Where is Mary?'.")
