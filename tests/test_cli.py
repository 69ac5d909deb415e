"""The commands: they parse, call, print, and name what is wrong."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from atlas_memory import presets
from atlas_memory.cli import app

SMALL = ["--hidden", "16", "--layers", "1", "--heads", "2", "--vocabulary", "20", "--window", "8", "--context", "16"]
run = CliRunner().invoke


def test_info() -> None:
    result = run(app, ["info", "--preset", "titans", "--backbone", "mag", *SMALL, "--memory", "chunk=8"])
    assert result.exit_code == 0, result.output
    for row in ("slow parameters", "initial values of fast weights", "state per sequence", "FLOPs per token"):
        assert row in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--preset", "atals"], "is unknown"),
        (["--backbone", "mix"], "is unknown"),
        (["--size", "7b"], "is unknown"),
        (["--size", "170m", "--intermediate", "64"], "fitted"),
        (["--memory", "chunk"], "name=value"),
        (["--memory", "chunk=0"], "chunk=0"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], named: str) -> None:
    result = run(app, ["info", *arguments])
    assert result.exit_code == 2
    assert named in result.output


def test_presets() -> None:
    result = run(app, ["presets"])
    assert result.exit_code == 0
    assert all(name in result.output for name in presets.names())  # none of them cut
