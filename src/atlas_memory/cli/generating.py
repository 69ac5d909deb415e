"""Text from a trained model."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, TextIO

import torch
import typer
from transformers import TextStreamer

from atlas_memory.cli.application import app, refused
from atlas_memory.data import load_tokenizer
from atlas_memory.data.streams import token_pieces
from atlas_memory.data.tokenizers import end_token
from atlas_memory.models.saved import load_saved
from atlas_memory.models.shipped import model_folder
from atlas_memory.models.writing import Sampling, write


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="Folder of a model and its tokenizer, such as OUT/final of `train`.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to go on from; without it and --file, stdin is read.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Text file to go on from, of any length.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to write at most.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the most probable token.", min=0)] = 0.8,
    top_p: Annotated[float, typer.Option(help="Choose among the most probable tokens of this total.", max=1)] = 0.95,
    top_k: Annotated[int | None, typer.Option(help="Choose among so many tokens.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="For the same text again.", min=0, max=2**63 - 1)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar while reading.")] = False,
) -> None:
    """Read a prompt of any length in constant memory, and write what may follow, token by token.

    Example: atlas-memory generate runs/quick/final --prompt "def main(" --tokens 100 --seed 1
    """
    try:
        if prompt is not None and file is not None:
            raise ValueError("prompt and file must not both be given.")
        sampling = Sampling(tokens, temperature, top_p, top_k, seed)
        folder = model_folder(model)
        network, tokenizer = load_saved(folder), load_tokenizer(folder)
        streamer = TextStreamer(tokenizer)
        with _opened(prompt, file) as text:
            ids = token_pieces(text, tokenizer)
            for token in write(network, ids, sampling, end=end_token(tokenizer), progress=not quiet):
                streamer.put(torch.tensor([token]))
        streamer.end()
    except UnicodeDecodeError as error:
        raise refused(ValueError(f"file={str(file)!r} is not text in UTF-8: {error}.")) from error
    except (ValueError, OSError, ImportError) as error:
        raise refused(error) from error


def _opened(prompt: str | None, file: Path | None) -> TextIO:
    if prompt is not None:
        return io.StringIO(prompt)
    if file is not None:
        return file.open(encoding="utf-8")
    return sys.stdin
