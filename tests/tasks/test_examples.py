"""Rendered examples in docstrings are what the code makes."""

from __future__ import annotations

import doctest
import importlib

import pytest

BABILONG = ("stories", "solver", "stream", "training", "confusing")
MODULES = (*(f"babilong.{name}" for name in BABILONG), "needle", "needle_training", "mqar", "mad")


@pytest.mark.parametrize("name", [*MODULES, "samples", "results"])
def test_examples(name: str) -> None:
    module = importlib.import_module(f"atlas_memory.tasks.{name}")
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried and not failed
