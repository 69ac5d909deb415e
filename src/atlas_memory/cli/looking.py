"""What there is: the presets, and what a model costs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from atlas_memory.cli.application import app, console, wide_table
from atlas_memory.models.accounting import SIZES, account, sized_config
from atlas_memory.models.configuration_atlas import BACKBONES, AtlasConfig
from atlas_memory.spec import presets


@app.command("presets")
def list_presets() -> None:
    """The family: every preset and its choices.

    Example: atlas-memory presets
    """
    fields = ("feature", "network", "objective", "window", "optimizer", "exact")
    table = wide_table(("preset", *fields))
    for name, spec in presets.items():
        table.add_row(name, *(str(getattr(spec, field)) for field in fields))
    console.print(table)


@app.command()
def info(
    preset: Annotated[str, typer.Option(help="The memory: see `atlas-memory presets`.")] = "atlas",
    backbone: Annotated[str, typer.Option(help=f"One of {', '.join(BACKBONES)}.")] = "mag",
    size: Annotated[str | None, typer.Option(help=f"A named size instead of widths: {', '.join(SIZES)}.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the feed-forward layers.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    window: Annotated[int | None, typer.Option(help="Window of attention.")] = None,
    segment: Annotated[int | None, typer.Option(help="Segment of mac.")] = None,
    memory_heads: Annotated[int | None, typer.Option(help="Heads of the memory.")] = None,
    memory: Annotated[
        list[str] | None, typer.Option(help="A field of the memory, as chunk=32; may be repeated.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens the FLOPs are an average over.", min=1)] = 1024,
) -> None:
    """What a model costs: parameters, state, FLOPs.

    Example: atlas-memory info --preset atlas --backbone mag --hidden 1536 --layers 24
    """
    given = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "sliding_window": window,
        "segment_length": segment,
        "memory_heads": memory_heads,
        "memory": dict(_field(text) for text in memory or []),
    }
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        if size is not None and intermediate is not None:
            raise ValueError("intermediate is fitted to the size: give --size or --intermediate.")
        fields |= {"preset": preset, "backbone": backbone}
        config = AtlasConfig(**fields) if size is None else sized_config(size, **fields)
        costs = account(config, context)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    title = f"{preset} in {backbone}: {config.num_hidden_layers} layers of {config.hidden_size}"
    table = Table("cost", "", title=title)
    for name, value in costs.rows():
        table.add_row(name, value)
    console.print(table)


def _field(text: str) -> tuple[str, Any]:
    """name=value, the value as in JSON, or else as it stands."""
    name, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"memory={text!r} must be name=value, such as chunk=32.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
