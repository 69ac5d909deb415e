"""Checks of single values: errors name the argument and what would be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_whole(name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        hint = ", or None" if optional else ""
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}{hint}.")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not a choice; allowed: {', '.join(allowed)}.")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")
