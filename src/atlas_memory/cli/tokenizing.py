"""Training tokenizers, and looking at them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from atlas_memory.cli.application import app, console, refused
from atlas_memory.data import SourceConfig, load_tokenizer, read_documents, train_tokenizer
from atlas_memory.data.tokenizers import check_trainable, pieces

tokenizers = typer.Typer(help="Train a tokenizer, or look at one.", no_args_is_help=True)
app.add_typer(tokenizers, name="tokenizer")


@tokenizers.command("train")
def tokenizer_train(
    source: Annotated[
        str, typer.Option(help="builtin, text:PATH, jsonl:PATH, datasets:NAME, or a file, folder or glob.")
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the tokenizer.")],
    vocabulary: Annotated[int, typer.Option(help="Tokens at most, special ones included.")] = 4096,
    field: Annotated[str, typer.Option(help="jsonl, datasets: which field holds the text.")] = "text",
    limit: Annotated[int | None, typer.Option(help="Documents at most.")] = None,
    validation: Annotated[float, typer.Option(help="Share of documents held out, as in training.")] = 0.05,
) -> None:
    """Train a byte-level BPE tokenizer on the training documents of a source.

    Example: atlas-memory tokenizer train --source builtin --vocabulary 4096 --out my-tokenizer
    """
    try:
        check_trainable(vocabulary, out)
        documents = read_documents(SourceConfig.parse(source, field=field, limit=limit), "train", validation)
        tokenizer = train_tokenizer((document.text for document in documents), vocabulary, out)
    except (ValueError, ImportError, OSError) as error:
        raise refused(error) from error
    console.print(f"{len(tokenizer):,} tokens in {out}", markup=False)


@tokenizers.command("show")
def tokenizer_show(
    name: Annotated[str, typer.Argument(help="bytes, a folder, or a name on the hub.")],
    text: Annotated[str, typer.Option(help="What to split.")] = "A memory that learns while it reads.",
) -> None:
    """What a tokenizer makes of a text.

    Example: atlas-memory tokenizer show bytes --text "naïve"
    """
    try:
        tokenizer = load_tokenizer(name)
    except (ValueError, ImportError) as error:
        raise refused(error) from error
    split = pieces(tokenizer, text)
    table = Table("token", "id")
    for token, piece in split:
        table.add_row(escape(repr(piece)), str(token))
    console.print(table)
    console.print(f"{name}: {len(tokenizer):,} tokens, a document ends with {tokenizer.eos_token}", markup=False)
    console.print(f"{len(text.encode()) / max(len(split), 1):.2f} bytes a token")
