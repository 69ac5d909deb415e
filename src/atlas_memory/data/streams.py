"""Text of any length as token ids, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from atlas_memory.data.tokenizers import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters read at once: much more than a word, much less than memory.
PIECE = 2**16


def token_pieces(text: TextIO, tokenizer: PreTrainedTokenizerBase, piece: int = PIECE) -> Iterator[list[int]]:
    """Ids of everything in a stream, without the token that ends a document.

    Pieces are cut before white space that follows something else, where tokenizers that split words split anyway: the
    ids are those of the whole text, unless a single word is longer than a piece.
    """
    encoder, rest = Encoder(tokenizer), ""
    while block := text.read(piece):
        rest += block
        cut = _last_gap(rest) or len(rest)
        if cut < len(rest) or len(rest) > piece:
            yield encoder.pieces([rest[:cut]])[0]
            rest = rest[cut:]
    if rest:
        yield encoder.pieces([rest])[0]


def _last_gap(text: str) -> int:
    """Where the last white space begins; 0 where there is none."""
    gap = max(text.rfind(space) for space in (" ", "\n"))
    return len(text[: gap + 1].rstrip()) if gap > 0 else 0
