"""The simulator: deterministic, solvable, and like the public files in everything that is counted."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from atlas_memory.tasks.babilong.facts import TASKS, Story, read_stories
from atlas_memory.tasks.babilong.language import Event, read_question, read_sentence
from atlas_memory.tasks.babilong.solver import Answer, Solver
from atlas_memory.tasks.babilong.stories import simulate
from tests.conftest import SHARED


def simulated(task: str, seed: int, stories: int) -> list[Story]:
    return [simulate(task, f"{seed} {number}") for number in range(stories)]


@pytest.mark.parametrize("task", TASKS)
def test_the_solver_answers_every_story(task: str) -> None:
    for story in simulated(task, 3, 60):
        assert len(story.questions) == (1 if task == "qa4" else 5)
        solver = Solver()
        for text, question in story.lines():
            if question is None:
                solver.tell(text)
            else:
                assert solver.answers(question.text) == [Answer(question.answer, question.supports)]


def test_stories_are_those_of_their_seed() -> None:
    assert simulate("qa5", 1) == simulate("qa5", 1) != simulate("qa5", 2)
    with pytest.raises(ValueError, match="task='qa11' is not a choice; allowed: qa1"):
        simulate("qa11", 1)


def counts(stories: list[Story]) -> dict[str, Counter[object]]:
    """Everything that is compared, as shares are."""
    found: dict[str, Counter[object]] = {
        name: Counter()
        for name in (
            *("forms", "kinds", "people", "same person again", "first question after", "questions apart", "questions"),
            *("answers", "supports", "nearest support", "first support", "second support", "third support"),
            *("gift after gift", "things between two", "word of the answer"),
        )
    }
    for story in stories:
        events = [read_sentence(sentence) for sentence in story.sentences]
        found["kinds"].update(event.kind for event in events)
        found["people"].update(event.subject for event in events)
        found["same person again"].update(a.subject == b.subject for a, b in itertools.pairwise(events))
        gifts = [event for event in events if event.kind == "gave"]
        found["gift after gift"].update(again(a, b) for a, b in itertools.pairwise(gifts))
        between = Counter((giver, receiver) for giver, receiver, _ in {(e.subject, e.second, e.first) for e in gifts})
        found["things between two"][max(between.values(), default=0)] += 1
        for sentence, event in zip(story.sentences, events, strict=True):
            for word in filter(None, event[1:]):
                sentence = sentence.replace(word, "·")
            found["forms"][sentence] += 1
        before = 0
        for question in story.questions:
            apart = min(question.asked_after - before, 12)
            found["questions apart" if before else "first question after"][apart] += 1
            before = question.asked_after
            found["questions"][read_question(question.text).kind] += 1
            found["answers"][question.answer] += 1
            for support in question.supports[:1]:
                words = (events[support].subject, events[support].first, events[support].second)
                found["word of the answer"][words.index(question.answer) if question.answer in words else None] += 1
            found["supports"][min(len(question.supports), 5)] += 1
            ages = [min(question.asked_after - support, 8) for support in question.supports]
            found["nearest support"][min(ages)] += 1
            for name, age in zip(("first support", "second support", "third support"), ages, strict=False):
                found[name][age] += 1
    return found


def again(one: Event, other: Event) -> tuple[bool, ...]:
    """What is the same in two gifts: the thing, and who gives to whom, as before or straight back."""
    to, back = (one.subject, one.second), (one.second, one.subject)
    return one.first == other.first, (other.subject, other.second) == to, (other.subject, other.second) == back


def distance(one: Counter[object], other: Counter[object]) -> float:
    """Total variation: the share of one that would have to move to make the other."""
    if not one and not other:
        return 0.0
    shares = [(one[key] / one.total(), other[key] / other.total()) for key in {*one, *other}]
    return sum(abs(a - b) for a, b in shares) / 2


@pytest.mark.shared
@pytest.mark.parametrize("task", TASKS)
def test_statistics_are_those_of_the_public_files(task: str) -> None:
    folder = SHARED / "data" / "babi"
    public = read_stories(folder / f"{task}_train.txt") + read_stories(folder / f"{task}_valid.txt")
    ours = simulated(task, 5, {"qa3": 600, "qa4": 4000}.get(task, 2000))
    # Two random halves of the files differ by up to 0.053 in one of these, and those of qa3, which has 380 stories, by
    # 0.075: the questions of a story hang together.
    tolerance = 0.09 if task == "qa3" else 0.05
    one, other = counts(public), counts(ours)
    for name in one:
        assert distance(one[name], other[name]) < tolerance, (name, one[name], other[name])
    mean = [sum(len(story.sentences) for story in stories) / len(stories) for stories in (public, ours)]
    assert mean[1] == pytest.approx(mean[0], rel=0.08)
