"""What the README shows works as printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from atlas_memory.cli import app

README = Path(__file__).parents[1] / "README.md"
COMMANDS = sorted(set(re.findall(r"atlas-memory ((?:[a-z]+)(?: [^`#\n|]*)?)", README.read_text(encoding="utf-8"))))
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_and_their_options_exist(words: str) -> None:
    """Each is parsed, not run: what follows the options may be anything."""
    command, arguments = typer.main.get_command(app), shlex.split(words)
    while commands := getattr(command, "commands", {}):
        assert arguments[0] in commands
        command = commands[arguments.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in arguments if word.startswith("--")} <= known


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {number}" for number in range(len(BLOCKS))])
def test_python_blocks(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(block, str(README), "exec"), {})
