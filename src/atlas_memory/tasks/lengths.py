"""Lengths of texts as the public benchmarks count them, whatever the tokenizer of a model is."""

from __future__ import annotations

import re

# Lengths are in tokens of GPT-2, 4.2 characters of English each, so that a coarse tokenizer cannot make a task shorter.
CHARACTERS_A_TOKEN = 4.2

_UNITS = {"": 1, "k": 1000, "m": 1_000_000}


def characters_of(tokens: float) -> float:
    return tokens * CHARACTERS_A_TOKEN


def tokens_of(characters: float) -> float:
    """GPT-2-equivalent tokens."""
    return characters / CHARACTERS_A_TOKEN


def parse_lengths(text: str) -> tuple[int, ...]:
    """`0k,4k,1M,4096` → (0, 4000, 1000000, 4096)."""
    lengths = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", part.strip())
        if found is None:
            raise ValueError(
                f"lengths={text!r}: {part!r} is no length; accepted: numbers such as 0k, 4k, 128k, 1M, 4096."
            )
        lengths.append(round(float(found[1]) * _UNITS[found[2].lower()]))
    return tuple(dict.fromkeys(lengths))


def length_name(tokens: int) -> str:
    """4000 → 4K, 1000000 → 1M, 4096 → 4096."""
    for unit, size in (("M", 1_000_000), ("K", 1000)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens) if tokens else "0K"
