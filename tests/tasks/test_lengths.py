"""Counts as people write them."""

from __future__ import annotations

import pytest

from atlas_memory.tasks.lengths import parse_count


@pytest.mark.parametrize(("text", "count"), [("2.5k", 2500), ("0.001M", 1000), ("10_000", 10_000), ("1.50k", 1500)])
def test_a_fraction_of_a_unit_is_a_whole_number(text: str, count: int) -> None:
    assert parse_count("tokens", text) == count


@pytest.mark.parametrize("text", ["1.5", "0.4", "1.0005k"])
def test_other_fractions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"tokens='{text}' is no whole number; accepted: such as 0k"):
        parse_count("tokens", text)
