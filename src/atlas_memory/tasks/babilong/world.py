"""The hidden world behind simulated stories: where everybody and everything is, and what was told of it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

OBJECTS = ("apple", "football", "milk")


class Told(NamedTuple):
    """An event as it was told; fields as in `language.Event`."""

    number: int
    kind: str
    subject: str
    first: str
    second: str = ""


class World:
    """People and objects at random places; every action changes the world and is told.

    places: person → where they are. holder: object → who carries it. taken, handled: object → when it was last taken,
    and when a hand last had to do with it. visits: object → the events by which it came to places, as far as was told.
    hands: person → object → event numbers.
    """

    def __init__(self, people: Sequence[str], rooms: Sequence[str], draw: random.Random) -> None:
        self.people, self.rooms, self._draw = people, rooms, draw
        self.places = {person: draw.choice(rooms) for person in people}
        self._lying = {thing: draw.choice(rooms) for thing in OBJECTS}
        self.told: list[Told] = []
        self.holder: dict[str, str] = {}
        self.taken: dict[str, Told] = {}
        self.handled: dict[str, Told] = {}
        self.visits: defaultdict[str, list[Told]] = defaultdict(list)
        self.hands: defaultdict[str, dict[str, list[int]]] = defaultdict(dict)
        self._walked: dict[str, Told] = {}  # person → the last event that tells where they are

    def carried_by(self, person: str) -> list[str]:
        return [thing for thing in OBJECTS if self.holder.get(thing) == person]

    def last_word(self, person: str) -> Told:
        """The last event that tells where somebody is or is not."""
        return self._walked[person]

    def since_handled(self, thing: str) -> bool:
        """Whether it lies where it was dropped, or was carried about since it was taken."""
        return self.handled[thing].kind == "dropped" or self.visits[thing][-1].number > self.handled[thing].number

    def act(self, weights: Mapping[str, int]) -> Told:
        """Let somebody do something that is possible, by the weights of the actions."""
        possible = [(person, kind) for person in self.people for kind in weights if self._possible(person, kind)]
        person, kind = self._draw.choices(possible, [weights[kind] for _, kind in possible])[0]
        return _ACTIONS[kind](self, person)

    def _possible(self, person: str, kind: str) -> bool:
        if kind == "took":
            return bool(self._within_reach(person))
        if kind == "dropped":
            return bool(self.carried_by(person))
        if kind == "gave":
            return self.holder.get(self._gift()) == person
        return True

    def _within_reach(self, person: str) -> list[str]:
        return [thing for thing, place in self._lying.items() if place == self.places[person]]

    def _beside(self, person: str) -> list[str]:
        return [other for other in self.people if other != person and self.places[other] == self.places[person]]

    def _gift(self) -> str:
        """What would be given next: of all that is carried beside somebody, the first; the public files have it so."""
        return next((thing for thing in OBJECTS if thing in self.holder and self._beside(self.holder[thing])), "")

    def _tell(self, kind: str, subject: str, first: str, second: str = "") -> Told:
        self.told.append(Told(len(self.told), kind, subject, first, second))
        return self.told[-1]

    def _walk(self, person: str) -> tuple[str, str]:
        """To another room: where from, where to."""
        before = self.places[person]
        self.places[person] = self._draw.choice([room for room in self.rooms if room != before])
        return before, self.places[person]

    def move(self, person: str) -> Told:
        return self._arrive(self._tell("moved", person, self._walk(person)[1]))

    def appear(self, person: str) -> Told:
        return self._arrive(self._tell("present", person, self._walk(person)[1]))

    def _arrive(self, told: Told) -> Told:
        self._walked[told.subject] = told
        for thing in self.carried_by(told.subject):
            self._visit(thing, told)
        return told

    def leave(self, person: str) -> Told:
        """Off to another room; told is only which one they have left."""
        self._walked[person] = self._tell("absent", person, self._walk(person)[0])
        return self._walked[person]

    def vanish(self, person: str) -> Told:
        """Off to another room; told are that one and any room, in any order."""
        rooms = [self._walk(person)[1], self._draw.choice(self.rooms)]
        self._draw.shuffle(rooms)
        self._walked[person] = self._tell("either", person, *rooms)
        return self._walked[person]

    def take(self, person: str) -> Told:
        thing = self._draw.choice(self._within_reach(person))
        del self._lying[thing]
        if person in self._walked:
            self._visit(thing, self._walked[person])
        self.taken[thing] = self._tell("took", person, thing)
        return self._receive(person, self.taken[thing])

    def drop(self, person: str) -> Told:
        told = self._tell("dropped", person, self._draw.choice(self.carried_by(person)))
        self._lying[told.first] = self.places[person]
        del self.holder[told.first]
        return self._handle(person, told)

    def give(self, person: str) -> Told:
        """To the first of those beside them."""
        told = self._tell("gave", person, self._gift(), self._beside(person)[0])
        self._handle(person, told)
        return self._receive(told.second, told)

    def _receive(self, person: str, told: Told) -> Told:
        self.holder[told.first] = person
        return self._handle(person, told)

    def _handle(self, person: str, told: Told) -> Told:
        self.handled[told.first] = told
        self.hands[person].setdefault(told.first, []).append(told.number)
        return told

    def _visit(self, thing: str, told: Told) -> None:
        visits = self.visits[thing]
        if visits and visits[-1].first == told.first:
            visits.pop()  # it was there already; newer word of it
        visits.append(told)


_ACTIONS = {
    "moved": World.move,
    "present": World.appear,
    "absent": World.leave,
    "either": World.vanish,
    "took": World.take,
    "dropped": World.drop,
    "gave": World.give,
}
