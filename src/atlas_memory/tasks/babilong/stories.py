"""Our own simulator of bAbI's tasks 1 to 10: people walk, carry and hand over things, and are asked about.

A hidden world moves by rules, sentences tell what happens, and after every second sentence a question is drawn from
what the last five sentences mention, if what was told answers it; five questions make a story (qa4: one). Answers come
from the world, not from the text: that `solver` reads the same from the text is a test. How likely is what follows the
public files; a test compares.

>>> for text, question in simulate("qa1", seed=0).lines():
...     print(text if question is None else f"{text} {question.answer}")
Sandra went back to the bedroom.
John moved to the hallway.
Where is Sandra? bedroom
Mary travelled to the office.
Daniel journeyed to the kitchen.
Where is Sandra? bedroom
Daniel went to the garden.
Mary travelled to the hallway.
Where is Daniel? garden
John travelled to the office.
Mary moved to the garden.
Where is Daniel? garden
Sandra journeyed to the kitchen.
John moved to the bathroom.
Where is Mary? garden
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from atlas_memory.checks import check_choice
from atlas_memory.tasks.babilong.facts import TASKS, Question, Story
from atlas_memory.tasks.babilong.language import (
    ABSENT,
    DROPPED,
    GAVE,
    MOVED,
    NOTHING,
    NUMBERS,
    OPPOSITE,
    QUESTIONS,
    TOOK,
)
from atlas_memory.tasks.babilong.world import Told, World

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
TOWN = ("bedroom", "cinema", "kitchen", "office", "park", "school")
FAMILY = ("John", "Mary", "Sandra", "Daniel")
FRIENDS = ("Mary", "Fred", "Bill", "Jeff")
CLASS = ("Mary", "Fred", "Bill", "Julie")

SENTENCES_A_ROUND = 2
REMEMBERED = 5  # questions are about something in the last five sentences
THERE = 0.2  # share of "there" at the end where it is optional
QUESTIONS_A_STORY = 5


@dataclasses.dataclass(frozen=True)
class Kind:
    """One task: who acts where, how likely each action is against the others, and what is asked."""

    ask: Callable[[World, Told, random.Random], Question | None]
    asks_about: tuple[str, ...]  # kinds of events a question may start from
    weights: dict[str, int]  # of those actions that are possible at the time
    people: tuple[str, ...] = FAMILY
    places: tuple[str, ...] = PLACES
    taken_there: float = 1.0


def simulate(task: str, seed: int | str) -> Story:
    """One story of a task; the same for the same seed."""
    check_choice("task", task, TASKS)
    draw = random.Random(f"{task} {seed}")
    return _map_story(draw) if task == "qa4" else _told_story(KINDS[task], draw)


def _told_story(kind: Kind, draw: random.Random) -> Story:
    world = World(kind.people, kind.places, draw)
    sentences: list[str] = []
    questions: list[Question] = []
    while len(questions) < QUESTIONS_A_STORY:
        for _ in range(SENTENCES_A_ROUND):
            sentences.append(_sentence(world.act(kind.weights), kind, draw))
        recent = [told for told in world.told[-REMEMBERED:] if told.kind in kind.asks_about]
        asked = [question for told in recent if (question := kind.ask(world, told, draw)) is not None]
        if asked:
            questions.append(draw.choice(asked))
    return Story(tuple(sentences), tuple(questions))


def _sentence(told: Told, kind: Kind, draw: random.Random) -> str:
    forms = {
        "moved": f"{told.subject} {draw.choice(MOVED)} the {told.first}",
        "present": f"{told.subject} is in the {told.first}",
        "absent": f"{told.subject} {draw.choice(ABSENT)} the {told.first}",
        "either": f"{told.subject} is either in the {told.first} or the {told.second}",
        "took": f"{told.subject} {draw.choice(TOOK)} the {told.first}" + _there(kind.taken_there, draw),
        "dropped": f"{told.subject} {draw.choice(DROPPED)} the {told.first}" + _there(THERE, draw),
        "gave": f"{told.subject} {draw.choice(GAVE)} the {told.first} to {told.second}",
    }
    return forms[told.kind] + "."


def _there(share: float, draw: random.Random) -> str:
    return " there" if draw.random() < share else ""


def _question(world: World, kind: str, words: tuple[str, ...], answer: str, supports: tuple[int, ...]) -> Question:
    return Question(QUESTIONS[kind].format(*words), answer, supports, len(world.told))


def _where_is_person(world: World, told: Told, draw: random.Random) -> Question | None:
    last = world.last_word(told.subject)
    return _question(world, "person", (told.subject,), last.first, (last.number,))


def _where_is_object(world: World, told: Told, draw: random.Random) -> Question | None:
    handled, visits = world.handled[told.first], world.visits[told.first]
    if not visits or not world.since_handled(told.first):
        return None
    return _question(world, "object", (told.first,), visits[-1].first, (handled.number, visits[-1].number))


def _where_was_object(world: World, told: Told, draw: random.Random) -> Question | None:
    """About any place but the first that whoever took it last has carried it to; the last time it was there."""
    handled, since = world.handled[told.first], world.taken[told.first].number
    visits = [visit for visit in world.visits[told.first] if visit.number > since]
    if len(visits) < 2:
        return None
    place = draw.choice(visits[1:]).first
    last = max(number for number, visit in enumerate(visits) if visit.first == place)
    before, here = visits[last - 1], visits[last]
    supports = (handled.number, here.number, before.number)
    return _question(world, "before", (told.first, here.first), before.first, supports)


def _gift(world: World, told: Told, draw: random.Random) -> Question | None:
    gift = [event for event in world.told if event.kind == "gave" and event.first == told.first][-1]
    kind = draw.choice(("what given", "what given", "who gave to", "given to whom", "who gave", "who received"))
    between = {e.first for e in world.told if e.kind == "gave" and (e.subject, e.second) == (gift.subject, gift.second)}
    if kind == "what given" and len(between) > 1:
        return None  # it would have two right answers
    words, answer = {
        "what given": ((gift.subject, gift.second), gift.first),
        "who gave to": ((gift.first, gift.second), gift.subject),
        "given to whom": ((gift.subject, gift.first), gift.second),
        "who gave": ((gift.first,), gift.subject),
        "who received": ((gift.first,), gift.second),
    }[kind]
    return _question(world, kind, words, answer, (gift.number,))


def _whether_in(world: World, told: Told, draw: random.Random) -> Question | None:
    """Half of the time about the place where somebody is; of one who is said to be elsewhere, about that place."""
    last, here = world.last_word(told.subject), world.places[told.subject]
    place = here if draw.random() < 0.5 else draw.choice([other for other in world.rooms if other != here])
    if last.kind == "absent":
        place, answer = last.first, "no"
    elif last.kind == "either":
        answer = "maybe" if place in (last.first, last.second) else "no"
    else:
        answer = "yes" if place == here else "no"
    return _question(world, "whether in", (told.subject, place), answer, (last.number,))


def _how_many(world: World, told: Told, draw: random.Random) -> Question | None:
    supports = sorted(number for events in world.hands[told.subject].values() for number in events)
    carried = NUMBERS[len(world.carried_by(told.subject))]
    return _question(world, "how many", (told.subject,), carried, tuple(supports))


def _what_carried(world: World, told: Told, draw: random.Random) -> Question | None:
    hands = world.hands[told.subject]
    carried = ",".join(thing for thing in hands if world.holder.get(thing) == told.subject) or NOTHING
    supports = tuple(number for events in hands.values() for number in events)
    return _question(world, "what carried", (told.subject,), carried, supports)


def _map_story(draw: random.Random) -> Story:
    """Three places in a row, each end described with the middle, and one question about two neighbours."""
    direction = draw.choice(tuple(OPPOSITE))
    middle, *ends = draw.sample(PLACES, 3)
    sides = list(zip(ends, (direction, OPPOSITE[direction]), strict=True))
    draw.shuffle(sides)
    told = [(end, side, middle) if draw.random() < 2 / 3 else (middle, OPPOSITE[side], end) for end, side in sides]
    support = draw.randrange(2)
    answer, side, about = told[support]  # what a sentence begins with is what is asked for
    if draw.random() < 0.5:
        text = QUESTIONS["what lies"].format(side, about)
    else:
        text = QUESTIONS["lies of what"].format(about, OPPOSITE[side])
    sentences = tuple(f"The {one} is {side} of the {other}." for one, side, other in told)
    return Story(sentences, (Question(text, answer, (support,), 2),))


_MOVES = {"moved": 5}
_CARRYING = {**_MOVES, "took": 6, "dropped": 6}
_GIVING = {**_CARRYING, "gave": 23}
_HANDS = ("took", "dropped", "gave")

KINDS = {
    "qa1": Kind(_where_is_person, ("moved",), _MOVES),
    "qa2": Kind(_where_is_object, ("took", "dropped"), _CARRYING),
    "qa3": Kind(_where_was_object, ("took", "dropped"), _CARRYING, taken_there=THERE),
    "qa5": Kind(_gift, ("gave",), _GIVING, people=FRIENDS),
    "qa6": Kind(_whether_in, ("moved",), _CARRYING),
    "qa7": Kind(_how_many, _HANDS, _GIVING),
    "qa8": Kind(_what_carried, _HANDS, _CARRYING),
    "qa9": Kind(_whether_in, ("moved", "present", "absent"), {"moved": 2, "present": 1, "absent": 1}),
    "qa10": Kind(
        _whether_in,
        ("moved", "present", "either"),
        {"moved": 2, "present": 1, "either": 1},
        people=CLASS,
        places=TOWN,
    ),
}
