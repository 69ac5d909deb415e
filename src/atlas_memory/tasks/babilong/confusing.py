"""A background that names the people, places and things of the stories and tells nothing about them.

Names and nouns of its sentences are replaced by the stories' own. A memory that writes wherever such a word falls
learns to read the sentence around it; in a million tokens of novels there are enough Johns, kitchens and glasses of
milk to overwrite every fact.

>>> import random
>>> replaced("Then she took Harriet by the hand.", random.Random(1))
'Then Mary took Julie by the hand.'
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from atlas_memory.tasks.babilong.language import read_sentence
from atlas_memory.tasks.babilong.stories import CLASS, FAMILY, FRIENDS, PLACES, TOWN
from atlas_memory.tasks.babilong.world import OBJECTS
from atlas_memory.tasks.background import Background

_PEOPLE = tuple(dict.fromkeys((*FAMILY, *FRIENDS, *CLASS)))
_THINGS = (*OBJECTS, *OBJECTS, *dict.fromkeys((*PLACES, *TOWN)))
_CHANGED = 0.5  # of the words that could be
# A capital inside a sentence, or the one who does something; and what follows an article.
_SOMEBODY = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+\b|^(?:He|She)\b|(?<= )(?:he|she)\b")
_SOMETHING = re.compile(r"(?<=\bthe )[a-z]{3,}\b|(?<=\ba )[a-z]{3,}\b")


class Confusing:
    """Of another background's sentences a share with words of the stories in them."""

    def __init__(self, background: Background, share: float) -> None:
        self._background, self._share = background, share

    def sentences(self, seed: str) -> Iterator[str]:
        draw = random.Random(f"confusing {seed}")
        for sentence in self._background.sentences(seed):
            yield replaced(sentence, draw) if draw.random() < self._share else sentence


def replaced(sentence: str, draw: random.Random) -> str:
    """Some of its names and nouns replaced, unless that makes it a fact."""

    def one_of(words: tuple[str, ...]) -> Callable[[re.Match[str]], str]:
        return lambda found: draw.choice(words) if draw.random() < _CHANGED else found[0]

    changed = _SOMETHING.sub(one_of(_THINGS), _SOMEBODY.sub(one_of(_PEOPLE), sentence))
    return sentence if _is_fact(changed) else changed


def _is_fact(sentence: str) -> bool:
    """Whether a story could tell it: `John went to the window.` is none."""
    try:
        event = read_sentence(sentence)
    except ValueError:
        return False
    return {event.subject, event.first} <= {*_PEOPLE, *_THINGS}
