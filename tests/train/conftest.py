from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps one state a process, and data one cache a user: every test has its own."""
    monkeypatch.setenv("ATLAS_MEMORY_CACHE", str(tmp_path / "data-cache"))
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
