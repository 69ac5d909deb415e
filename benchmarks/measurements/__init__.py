"""Every measurement, grouped by what it compares with."""

from __future__ import annotations

import importlib

GROUPS = (
    "peer",
    "matmul",
    "variants",
    "muon",
    "attention",
    "long_streams",
    "language_models",
    "reading",
    "presets",
    "facts",
    "training",
    "scaling",
)


def enter_all() -> None:
    """Fill the registry's table, in the order of the report: a module enters its measurements when it is imported."""
    for group in GROUPS:
        importlib.import_module(f"{__name__}.{group}")
