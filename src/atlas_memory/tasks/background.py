"""Text to hide things in: sentences of books, read on from a random place, or sentences made here.

A background gives the same sentences for the same seed, one at a time: it never holds more than two blocks of a file,
however long its lines are.
"""

from __future__ import annotations

import codecs
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from atlas_memory.data.options import TEXT_SUFFIXES
from atlas_memory.files import digest_of
from atlas_memory.tasks.files import find_files
from atlas_memory.tasks.lengths import CHARACTERS_A_TOKEN

BUILTIN = "builtin"
SHORTEST = 10 * CHARACTERS_A_TOKEN  # characters of ten tokens: shorter sentences are left out
LONGEST = 2000  # characters; what has no full stop for that long (a table, a list) is cut
_BLOCK = 2**16  # bytes
_PAGE = 4096  # bytes: a text no longer than that is read from its beginning, since few sentences begin later

# White space after a full stop, which may stand before a closing quote, but not after a title. Titles are looked for
# only where a full stop was found: asked at every character, they would make this the slowest part of reading.
_END = re.compile(r"[.!?][\"'”’)\]]?(\s+)")
_TITLE = re.compile(r"\b(?:Mrs?|Dr|St)$")


class Background(Protocol):
    """Sentences without end, the same for the same seed."""

    def sentences(self, seed: str) -> Iterator[str]: ...


def open_background(paths: str = BUILTIN) -> Background:
    """`builtin`, or text files: a folder, a glob, or a comma-separated list."""
    if paths == BUILTIN:
        return MadeUp()
    books = Books(find_files("background", paths, TEXT_SUFFIXES))
    next(books.sentences(""))  # that there is one is seen before the work, not in the middle of it
    return books


def all_sentences(files: Iterable[Path]) -> Iterator[str]:
    """Of text files from beginning to end, those that a background would give."""
    return itertools.chain.from_iterable(_sentences(file, 0) for file in files)


def background_digest(paths: str) -> str:
    """Equal for equal backgrounds: of files what is in them, not where they lie."""
    return paths if paths == BUILTIN else digest_of(find_files("background", paths, TEXT_SUFFIXES))


class Books:
    """A random book from a random place on, then another; of a page or less, all."""

    def __init__(self, files: list[Path]) -> None:
        self.files = [file for file in files if file.stat().st_size]
        if not self.files:
            raise ValueError(f"background={[str(file) for file in files]} has only empty files.")

    def sentences(self, seed: str) -> Iterator[str]:
        draw, barren = random.Random(f"books {seed}"), 0
        while barren < 1000:
            file = draw.choice(self.files)
            barren += 1
            size = file.stat().st_size
            for sentence in _sentences(file, draw.randrange(size) if size > _PAGE else 0):
                barren = 0
                yield sentence
        raise ValueError(f"background={[str(file) for file in self.files]} has no sentences of ten tokens and more.")


def _sentences(file: Path, begin: int) -> Iterator[str]:
    """From the first sentence that begins after byte `begin` to the end of the file."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps a character that is cut for the next block
    with file.open("rb") as content:
        content.seek(begin)
        rest, first = "", begin > 0
        while block := content.read(_BLOCK):
            block += content.readline(_BLOCK)  # to the end of a line, which a sentence may end with
            pieces = _split(rest + decoder.decode(block))
            rest = next(pieces)
            for after in pieces:
                if not first:
                    yield from _kept(rest)
                rest, first = after, False
            if len(rest) > LONGEST:
                yield from _kept(rest)
                rest = ""
        if not first:
            yield from _kept(rest + decoder.decode(b"", final=True))


def _split(text: str) -> Iterator[str]:
    """Sentences, without the white space between them, found when asked for; the last one may go on."""
    begin = 0
    for end in _END.finditer(text):
        at, after = end.start(), end.start(1)
        if text[at] != "." or after > at + 1 or not _TITLE.search(text, max(at - 4, 0), at):
            yield text[begin:after]
            begin = end.end()
    yield text[begin:]


def _kept(sentence: str) -> Iterator[str]:
    text = " ".join(sentence.split())
    if len(text) >= SHORTEST:
        yield text[:LONGEST]


class MadeUp:
    """Readable sentences of a small grammar; none of its people and places is in any task."""

    def sentences(self, seed: str) -> Iterator[str]:
        draw = random.Random(f"made up {seed}")
        while True:
            sentence = draw.choice(_FORMS).format_map(_Words(draw))
            yield sentence[0].upper() + sentence[1:]


class _Words(dict[str, str]):
    """A drawn word for every place of a form."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw

    def __missing__(self, kind: str) -> str:
        return self._draw.choice(_LEXICON[kind[:-1] if kind[-1].isdigit() else kind])


_FORMS = (
    "the {adjective} {person} {did} the {thing} {where} while {weather}.",
    "{when}, a {adjective} {person} {did} one {thing} and {did2} another {where}.",
    "nobody {where} remembered why the {person} had {done} the {adjective} {thing}.",
    "{weather}, and the {person} {did} another {thing} before the {person2} came back.",
    "it was said {where} that every {person} once {did} a {adjective} {thing}.",
    "the {thing} that the {person} {did} {when} was more {adjective} than the old {thing2}.",
    "when {weather}, the {adjective} {person} never {did} the {thing} {where}.",
    "a letter about the {thing} lay {where} for years, {adjective} and unread, until a {person} {did} it.",
    "{when} the {person} and the {person2} {did} their {thing} in a {adjective} silence.",
    "there was something {adjective} in how the {person} {did} the {thing} {when}.",
)
_ONE_WORD = {
    "adjective": "quiet narrow golden heavy patient crooked distant pale sudden gentle rusty curious hollow bright "
    "tired faded careful bitter wide solemn",
    "person": "sailor baker clerk fiddler widow shepherd printer captain weaver doctor stranger miller painter judge "
    "ferryman tailor gardener teacher pedlar watchman",
    "thing": "ledger lantern barrel ribbon kettle compass violin blanket hammer basket portrait anchor mirror saddle "
    "candle ladder bell carpet clock map",
    "did": "mended carried sold hid painted counted praised borrowed polished weighed forgot studied",
    "done": "mended carried sold hidden painted counted praised borrowed polished weighed forgotten studied",
}
_LEXICON: dict[str, Sequence[str]] = {
    **{kind: words.split() for kind, words in _ONE_WORD.items()},
    "where": (
        "by the harbour",
        "under the bridge",
        "along the north road",
        "behind the mill",
        "near the old chapel",
        "at the edge of the forest",
        "on the market square",
        "beside the river",
    ),
    "when": (
        "early in the morning",
        "after the long winter",
        "towards the end of the week",
        "on the night of the fair",
        "in the year of the flood",
        "a little before noon",
    ),
    "weather": (
        "the rain fell on the slate roofs",
        "the wind turned to the east",
        "a thin mist rose from the fields",
        "the first snow was melting",
        "the sun went down behind the hills",
        "thunder rolled over the valley",
    ),
}
