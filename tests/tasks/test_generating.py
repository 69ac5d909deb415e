"""`atlas-memory generate` stops where documents end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atlas_memory.cli import app, generating
from atlas_memory.data.tokenizers import byte_tokenizer, end_token
from tests.tasks.conftest import save_small


def test_text_ends_with_the_token_that_ends_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a tokenizer that has no eos_token: another special token then ends documents."""
    model, tokenizer = save_small(tmp_path / "model", 320), byte_tokenizer()
    tokenizer.eos_token, tokenizer.sep_token = None, "<|end|>"
    tokenizer.save_pretrained(model)
    ends = []

    def write(*_: Any, end: int | None, **__: Any) -> list[int]:
        ends.append(end)
        return [65]

    monkeypatch.setattr(generating, "write", write)
    result = CliRunner().invoke(app, ["generate", str(model), "--prompt", "x", "--quiet"])
    assert result.exit_code == 0, result.output
    assert ends == [end_token(tokenizer)] == [256]
