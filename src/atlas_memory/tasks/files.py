"""Text files as people name them: a folder, a glob, or a comma-separated list of either and of files."""

from __future__ import annotations

import os.path
from pathlib import Path

from atlas_memory.data.options import SourceConfig
from atlas_memory.data.sources import EmptySourceError, TextFiles


def find_files(argument: str, paths: str, suffixes: tuple[str, ...]) -> list[Path]:
    """All files in the order given, folders and globs sorted; each name has to match something."""
    found: list[Path] = []
    parts = [paths] if os.path.exists(paths) else [part.strip() for part in paths.split(",")]  # names may have commas
    for name in parts:
        try:
            found += TextFiles(SourceConfig("text", name, suffixes=suffixes)).files
        except (EmptySourceError, ValueError) as error:
            raise ValueError(
                f"{argument}={paths!r}: {name!r} matches no file; accepted: a folder, a glob, or a list with commas."
            ) from error
    return list(dict.fromkeys(found))
