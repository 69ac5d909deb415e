"""Checks of single values: errors name the argument and what would be accepted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def check_whole(name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        hint = ", or None" if optional else ""
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}{hint}.")


def check_seed(seed: Any) -> None:
    """One that every generator takes."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2**32 - 1.")


def check_some(name: str, values: Collection[Any]) -> None:
    if not values:
        raise ValueError(f"{name} is empty; give at least one.")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not a choice; allowed: {', '.join(allowed)}.")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")
