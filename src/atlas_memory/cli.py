"""The command line: parses, calls, prints."""

from __future__ import annotations

import typer

app = typer.Typer(help="Sequence models that learn while they read.", no_args_is_help=True)
