"""The launch files: they are shell, and what they call exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from torch.distributed.run import get_args_parser

from atlas_memory.cli import app
from tests.train.support import environment, logged, tiny_recipe, write_recipe

FOLDER = Path(__file__).parents[2] / "launch"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))


def launched(path: Path) -> tuple[list[str], str, list[str]]:
    """Options of the launcher, the command of ours, and its options."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if "torch.distributed.run" in line)
    launcher, ours = line.split("torch.distributed.run")[1].split("-m atlas_memory")
    options = [re.findall(r"(?<=\s)--[a-z-]+", part) for part in (launcher, ours)]
    return options[0], ours.split()[0], options[1]


def test_there_are_files() -> None:
    assert [path.name for path in FILES] == ["slurm.sbatch", "torchrun.sh"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_shell(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_and_options_exist(path: Path) -> None:
    of_launcher, command, of_ours = launched(path)
    assert of_launcher
    assert set(of_launcher) <= set(get_args_parser()._option_string_actions)
    commands = typer.main.get_command(app).commands
    assert command in commands
    known = {option for parameter in commands[command].params for option in parameter.opts}
    assert "--resume" in of_ours
    assert set(of_ours) <= known


@pytest.mark.slow
def test_a_launch_trains_and_goes_on(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path))
    settings = {**environment(), "PROCESSES": "2", "PYTHON": sys.executable}
    for steps in ("2", "4"):
        line = [str(FOLDER / "torchrun.sh"), str(recipe), str(tmp_path / "run"), "--steps", steps]
        finished = subprocess.run(line, env=settings, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
    assert len(logged(tmp_path / "run")) == 4
