from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atlas_memory.cli import app
from atlas_memory.cli.tokenizing import tokenizer_show, tokenizer_train


def example_of(command: object) -> list[str]:
    found = re.search(r"Example: atlas-memory (.*)", str(command.__doc__))
    assert found
    return shlex.split(found[1])


def test_the_examples_work_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    limited = [*example_of(tokenizer_train), "--limit", "40"]
    result = CliRunner().invoke(app, limited)
    assert result.exit_code == 0, result.output
    assert "tokens in my-tokenizer" in result.output
    result = CliRunner().invoke(app, ["tokenizer", "show", "my-tokenizer", "--text", "import [os]"])
    assert "' [' " in result.output
    assert "bytes a token" in result.output
    result = CliRunner().invoke(app, example_of(tokenizer_show))
    assert result.exit_code == 0
    assert "258 tokens, a document ends with <|end|>" in result.output


def test_refusals_are_one_line(tmp_path: Path) -> None:
    for words in (
        ["train", "--source", "nowhere", "--out", str(tmp_path / "new")],
        ["train", "--source", "builtin", "--vocabulary", "9", "--out", str(tmp_path / "new")],
        ["show", str(tmp_path)],
    ):
        result = CliRunner().invoke(app, ["tokenizer", *words])
        assert result.exit_code == 2
        assert re.fullmatch(r"error: [^\n]+\n", result.output)
    assert not (tmp_path / "new").exists()
