"""Reads a story as a person would, and answers its questions: an independent check of every story, ours and others'."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from atlas_memory.tasks.babilong.language import (
    NOTHING,
    NUMBERS,
    OPPOSITE,
    QUESTIONS,
    Event,
    read_question,
    read_sentence,
)


class UnanswerableError(ValueError):
    """The story does not say."""


class Answer(NamedTuple):
    text: str
    supports: tuple[int, ...]  # places of the sentences it follows from, in the order bAbI gives them


class Known(NamedTuple):
    """Where a person may be (places) or is not (absent), and the sentence that says so."""

    places: tuple[str, ...]
    absent: bool
    said: int

    @property
    def sure(self) -> bool:
        """Whether it tells the one place where they are."""
        return len(self.places) == 1 and not self.absent


class Visit(NamedTuple):
    """An object at a place, and the sentence by which it came there."""

    place: str
    said: int


class Solver:
    """Takes in sentences one by one; answers any question at any time.

    >>> solver = Solver(["Mary got the milk there.", "Mary went to the office."])
    >>> solver.answer("Where is the milk?")
    Answer(text='office', supports=(0, 1))
    """

    def __init__(self, sentences: Iterable[str] = ()) -> None:
        self._told = 0
        self._where: dict[str, Known] = {}
        self._handled: dict[str, int] = {}  # object → the sentence that last moved it to or from a hand
        # None of these learns of people and objects by being asked about them.
        self._visits: dict[str, list[Visit]] = {}  # object → where it has been
        self._carried: dict[str, set[str]] = {}
        self._hands: dict[str, dict[str, list[int]]] = {}  # person → object → sentences
        self._gifts: list[tuple[Event, int]] = []
        self._map: dict[tuple[str, str], tuple[str, int]] = {}  # (direction, place) → what lies there
        for sentence in sentences:
            self.tell(sentence)

    def tell(self, sentence: str) -> None:
        event = read_sentence(sentence)
        _TELL[event.kind](self, event, self._told)
        self._told += 1

    def answer(self, question: str) -> Answer:
        query = read_question(question)
        try:
            return _ANSWER[query.kind](self, *query.words)
        except (KeyError, IndexError) as error:
            raise UnanswerableError(
                f"question={question!r}: the {self._told} sentences before it do not say."
            ) from error

    def answers(self, question: str) -> list[Answer]:
        """Everything a question can mean, the latest first: after two gifts, `What did Mary give to Fred?` has two.

        In the public files of qa5 it is not always the latest: 20 of 10,000 questions mean the gift before.
        """
        first = self.answer(question)
        query = read_question(question)
        if query.kind != "what given":
            return [first]
        said = {event.first: said for event, said in self._gifts if (event.subject, event.second) == query.words}
        return [Answer(thing, (said[thing],)) for thing in sorted(said, key=lambda thing: -said[thing])]

    def answerable(self) -> dict[str, list[str]]:
        """Questions about people, objects and places that what was told answers, by the kind of query.

        >>> Solver(["Mary got the milk.", "Mary went to the office."]).answerable()["object"]
        ['Where is the milk?']
        """
        history = {thing: [visit.place for visit in visits] for thing, visits in self._visits.items()}
        words: dict[str, list[tuple[str, ...]]] = {
            "person": [(person,) for person, known in self._where.items() if known.sure],
            "object": [(thing,) for thing in history],
            "before": [(thing, place) for thing, places in history.items() for place in dict.fromkeys(places[1:])],
            "what carried": [(person,) for person in self._hands],
            "what lies": list(self._map),
            "lies of what": [(place, OPPOSITE[direction]) for direction, place in self._map],
        }
        return {kind: [QUESTIONS[kind].format(*chosen) for chosen in found] for kind, found in words.items() if found}

    # What sentences change.

    def _moved(self, event: Event, said: int) -> None:
        self._where[event.subject] = Known((event.first,), False, said)
        for carried in self._carried.get(event.subject, ()):
            self._visit(carried, event.first, said)

    def _absent(self, event: Event, said: int) -> None:
        self._where[event.subject] = Known((event.first,), True, said)

    def _either(self, event: Event, said: int) -> None:
        self._where[event.subject] = Known((event.first, event.second), False, said)

    def _took(self, event: Event, said: int) -> None:
        self._receive(event.subject, event.first, said)
        known = self._where.get(event.subject)
        if known is not None and known.sure:
            self._visit(event.first, known.places[0], known.said)

    def _dropped(self, event: Event, said: int) -> None:
        self._release(event.subject, event.first, said)

    def _gave(self, event: Event, said: int) -> None:
        self._gifts.append((event, said))
        self._release(event.subject, event.first, said)
        self._receive(event.second, event.first, said)

    def _lies(self, event: Event, said: int) -> None:
        self._map[event.first, event.second] = event.subject, said
        self._map[OPPOSITE[event.first], event.subject] = event.second, said

    def _receive(self, person: str, thing: str, said: int) -> None:
        self._carried.setdefault(person, set()).add(thing)
        self._handle(person, thing, said)

    def _release(self, person: str, thing: str, said: int) -> None:
        self._carried.setdefault(person, set()).discard(thing)  # a story may leave out how somebody came by it
        self._handle(person, thing, said)

    def _handle(self, person: str, thing: str, said: int) -> None:
        self._hands.setdefault(person, {}).setdefault(thing, []).append(said)
        self._handled[thing] = said

    def _visit(self, thing: str, place: str, said: int) -> None:
        visits = self._visits.setdefault(thing, [])
        if visits and visits[-1].place == place:
            visits.pop()  # it was there already; newer word of it
        visits.append(Visit(place, said))

    # What questions ask.

    def _person(self, person: str) -> Answer:
        known = self._where[person]
        if not known.sure:
            raise KeyError(person)
        return Answer(known.places[0], (known.said,))

    def _object(self, thing: str) -> Answer:
        visit = self._visits[thing][-1]
        return Answer(visit.place, (self._handled[thing], visit.said))

    def _before(self, thing: str, place: str) -> Answer:
        visits = self._visits[thing]
        last = max((number for number, visit in enumerate(visits) if visit.place == place), default=0)
        if last == 0:
            raise KeyError(place)
        return Answer(visits[last - 1].place, (self._handled[thing], visits[last].said, visits[last - 1].said))

    def _what_lies(self, direction: str, place: str) -> Answer:
        found, said = self._map[direction, place]
        return Answer(found, (said,))

    def _lies_of_what(self, place: str, direction: str) -> Answer:
        return self._what_lies(OPPOSITE[direction], place)

    def _gift(self, wanted: Callable[[Event], bool], field: str) -> Answer:
        event, said = [(event, said) for event, said in self._gifts if wanted(event)][-1]
        return Answer(getattr(event, field), (said,))

    def _whether_in(self, person: str, place: str) -> Answer:
        known = self._where[person]
        inside = place in known.places
        if known.absent and not inside:
            raise KeyError(place)
        sure = "no" if known.absent or not inside else "yes"
        return Answer("maybe" if inside and len(known.places) > 1 else sure, (known.said,))

    def _how_many(self, person: str) -> Answer:
        return Answer(
            NUMBERS[len(self._carried[person])], tuple(sorted(itertools.chain(*self._hands[person].values())))
        )

    def _what_carried(self, person: str) -> Answer:
        # Objects, and what is said of them, in the order in which they first came into these hands.
        carried = [thing for thing in self._hands[person] if thing in self._carried[person]]
        return Answer(",".join(carried) or NOTHING, tuple(itertools.chain(*self._hands[person].values())))


_TELL: dict[str, Callable[[Solver, Event, int], None]] = {
    "moved": Solver._moved,
    "present": Solver._moved,
    "absent": Solver._absent,
    "either": Solver._either,
    "took": Solver._took,
    "dropped": Solver._dropped,
    "gave": Solver._gave,
    "lies": Solver._lies,
}

_ANSWER: dict[str, Callable[..., Answer]] = {
    "person": Solver._person,
    "object": Solver._object,
    "before": Solver._before,
    "what lies": Solver._what_lies,
    "lies of what": Solver._lies_of_what,
    "what given": lambda s, giver, to: s._gift(lambda e: (e.subject, e.second) == (giver, to), "first"),
    "who gave to": lambda s, thing, to: s._gift(lambda e: (e.first, e.second) == (thing, to), "subject"),
    "given to whom": lambda s, giver, thing: s._gift(lambda e: (e.subject, e.first) == (giver, thing), "second"),
    "who gave": lambda s, thing: s._gift(lambda e: e.first == thing, "subject"),
    "who received": lambda s, thing: s._gift(lambda e: e.first == thing, "second"),
    "whether in": Solver._whether_in,
    "how many": Solver._how_many,
    "what carried": Solver._what_carried,
}
