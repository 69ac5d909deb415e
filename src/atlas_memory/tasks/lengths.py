"""Lengths of texts as the public benchmarks count them, whatever the tokenizer of a model is."""

from __future__ import annotations

import re
from fractions import Fraction

# Lengths are in tokens of GPT-2, 4.2 characters of English each, so that a coarse tokenizer cannot make a task shorter.
CHARACTERS_A_TOKEN = 4.2

_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


def characters_of(tokens: float) -> float:
    return tokens * CHARACTERS_A_TOKEN


def tokens_of(characters: float) -> float:
    """GPT-2-equivalent tokens."""
    return characters / CHARACTERS_A_TOKEN


def parse_count(name: str, text: str) -> int:
    """`4096`, `4k`, `1.5M`, `10_000` → 4096, 4000, 1500000, 10000. name: of the option, for the message."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower().replace("_", ""))
    accepted = "accepted: such as 0k, 4k, 1.5M, 4096."
    if found is None:
        raise ValueError(f"{name}={text!r} is no number; {accepted}")
    count = Fraction(found[1]) * _UNITS[found[2]]
    if count.denominator > 1:  # rounded, 0.4 would be none at all
        raise ValueError(f"{name}={text!r} is no whole number; {accepted}")
    return int(count)


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """`0k,4k,1M` → (0, 4000, 1000000), each once."""
    return tuple(dict.fromkeys(parse_count(name, part) for part in text.split(",")))


def length_name(tokens: int) -> str:
    """4000 → 4K, 1000000 → 1M, 4096 → 4096."""
    for unit, size in (("M", 1_000_000), ("K", 1000)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens) if tokens else "0K"
