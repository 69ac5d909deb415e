"""Backgrounds: whole sentences, from a place of their seed, without end."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import pytest

from atlas_memory.tasks.babilong.stories import CLASS, FAMILY, FRIENDS, PLACES, TOWN
from atlas_memory.tasks.babilong.world import OBJECTS
from atlas_memory.tasks.background import LONGEST, SHORTEST, MadeUp, open_background
from atlas_memory.tasks.files import find_files

TEXT = (
    "It was a long and rather tedious winter, said Mr. Brown to nobody in particular. Short one. “Is there any "
    "reason at all to believe\nthat the spring will ever come?” The old clock in the hall had nothing whatever to say "
    "to that.\n"
)


def take(path: str, seed: str, count: int) -> list[str]:
    return list(itertools.islice(open_background(path).sentences(seed), count))


def test_names_may_have_commas(tmp_path: Path) -> None:
    book = tmp_path / "Emma, a novel.txt"
    book.write_text("A sentence that is long enough to be kept in a background.")
    assert find_files("background", str(book), (".txt",)) == [book]
    assert find_files("background", f"{tmp_path},{tmp_path}", (".txt",)) == [book]


def test_lists_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the name of a file may be."""
    monkeypatch.chdir(tmp_path)
    books = [Path(f"the book of number {number}.txt") for number in range(20)]
    for book in books:
        book.write_text("")
    assert find_files("background", ",".join(map(str, books)), (".txt",)) == books


def test_books_are_read_on_in_whole_sentences(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT * 30)
    sentences = take(str(tmp_path), "1", 100)
    assert set(sentences) == {
        "It was a long and rather tedious winter, said Mr. Brown to nobody in particular.",
        "“Is there any reason at all to believe that the spring will ever come?”",
        "The old clock in the hall had nothing whatever to say to that.",
    }


def test_the_place_is_that_of_the_seed(tmp_path: Path) -> None:
    sentences = MadeUp().sentences("books")
    for book in ("one.txt", "two.txt"):
        (tmp_path / book).write_text(" ".join(itertools.islice(sentences, 300)))
    one = take(str(tmp_path), "1", 700)
    assert one == take(f"{tmp_path}/*.txt", "1", 700) == take(f"{tmp_path}/one.txt,{tmp_path}/two.txt", "1", 700)
    assert one[:4] != take(str(tmp_path), "2", 4)


def test_what_has_no_full_stop_is_cut(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT + "word " * 50_000 + "end. " + TEXT * 3)
    assert max(map(len, take(str(tmp_path), "1", 60))) <= LONGEST


def test_a_book_of_one_line_is_not_held(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    # Of two bytes each, after one of one: blocks end within a character.
    book.write_text("." + "éüöäéüöäé üöäéüöäé üöäéüöä éüöäéüöäé üöäéüöä éüöä éüöä. " * 60_000, encoding="utf-8")
    sentences = open_background(str(book)).sentences("1")
    tracemalloc.start()
    try:
        found = {next(sentences) for _ in range(8000)}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == {"éüöäéüöäé üöäéüöäé üöäéüöä éüöäéüöäé üöäéüöä éüöä éüöä."}
    assert peak < 2_000_000 < book.stat().st_size / 3


def test_files_without_sentences(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="only empty files"):
        open_background(str(tmp_path))
    (tmp_path / "short.txt").write_text("No. Yes. No. " * 10)
    with pytest.raises(ValueError, match="no sentences of ten tokens"):  # before anything is asked for
        open_background(str(tmp_path))


def test_a_book_of_one_sentence_is_one(tmp_path: Path) -> None:
    sentence = "All that there is in this book is a sentence, which nobody can begin to read in its middle."
    (tmp_path / "book.txt").write_text(sentence)
    for seed in range(20):
        assert take(str(tmp_path), str(seed), 3) == [sentence] * 3


def test_made_up_sentences_are_long_enough_and_name_nobody_of_a_task() -> None:
    sentences = list(itertools.islice(MadeUp().sentences("1"), 2000))
    assert len(set(sentences)) > 1950
    assert all(len(sentence) >= SHORTEST and sentence[0].isupper() for sentence in sentences)
    words = {word.strip(".,").casefold() for sentence in sentences for word in sentence.split()}
    named = {name.casefold() for names in (CLASS, FAMILY, FRIENDS, PLACES, TOWN, OBJECTS) for name in names}
    assert not words & named
