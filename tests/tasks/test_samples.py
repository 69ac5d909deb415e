"""Lengths, scores and intervals."""

from __future__ import annotations

import pytest

from atlas_memory.tasks.lengths import length_name, parse_count, parse_counts, tokens_of
from atlas_memory.tasks.results import wilson
from atlas_memory.tasks.samples import contains, exact_match, haystack


def test_lengths() -> None:
    assert parse_counts("lengths", "0k,4K, 1M,10M,4096,1.5k") == (0, 4000, 10**6, 10**7, 4096, 1500)
    assert [length_name(length) for length in (0, 4000, 10**6, 4096)] == ["0K", "4K", "1M", "4096"]
    assert [parse_count("length", length_name(length)) for length in (0, 16_000, 4096)] == [0, 16_000, 4096]
    assert tokens_of(42) == pytest.approx(10)
    with pytest.raises(ValueError, match="lengths='x' is no number; accepted: such as 0k"):
        parse_counts("lengths", "4k,x")


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        (" garden.", "garden", True),
        (" Garden", "garden", True),
        ("garden\nJohn", "garden", True),
        (" apple,milk. ", "apple,milk", True),
        (" milk,apple.", "apple,milk", False),
        (" the garden.", "garden", False),
        (" gardens.", "garden", False),
        ("", "garden", False),
        (". garden", "garden", False),
    ],
)
def test_exact_match(said: str, answer: str, right: bool) -> None:
    assert exact_match(said, answer) == right


def test_contains() -> None:
    assert contains(" it is 1234567, I think", "1234567") and not contains(" 123456", "1234567")


def test_intervals() -> None:
    # Values of scipy.stats.binomtest(...).proportion_ci(method="wilson").
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(81, 263) == pytest.approx((0.25529, 0.36620), abs=1e-4)
    assert wilson(40, 40)[1] == 1.0
    low, high = wilson(7, 20)
    assert low < 7 / 20 < high and wilson(70, 200)[0] > low
    with pytest.raises(ValueError, match="right=3, samples=2"):
        wilson(3, 2)


def test_hidden_sentences_go_to_their_gaps() -> None:
    background = ["a" * 9, "b" * 9, "c" * 9, "d" * 9]

    def hide(gaps: list[int], length: float) -> str:
        made = haystack(lambda: iter(background), length, ["X", "Y"], lambda count: [min(g, count) for g in gaps])
        return "".join(sentence[0] for sentence in made)

    assert hide([0, 2], 44) == "XabYcd"
    assert hide([1, 1], 34) == "aXYbc"
    assert hide([4, 4], 44) == "abcdXY"
    assert hide([0, 4], 0) == "XY"
