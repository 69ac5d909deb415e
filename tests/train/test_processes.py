"""Several processes, and processes that are killed: the same numbers as one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.support import (
    SEGMENTS,
    STEPS,
    command,
    cut_back,
    environment,
    logged,
    run,
    tiny_recipe,
    weights,
    write_recipe,
)

# Sums over ranks are added in another order: single precision, through a few steps of Adam.
TOLERANCE = 1e-4


def recipe_file(folder: Path, **sections: Any) -> Path:
    base = tiny_recipe(folder)
    merged = {name: {**base.get(name, {}), **section} for name, section in sections.items()}
    return write_recipe(folder / "recipe.yaml", tiny_recipe(folder, **merged))


def test_two_processes_are_one_and_their_checkpoints_too(tmp_path: Path) -> None:
    """Segments with carried states, three of four rows in a pass: the hardest case. Then 2 → 1 and 1 → 2."""
    recipe = recipe_file(tmp_path, data=SEGMENTS, loop={"rows_per_pass": 3}, checkpoint={"keep": STEPS})
    run(1, recipe, tmp_path / "one")
    run(2, recipe, tmp_path / "two")
    losses = logged(tmp_path / "one")
    assert logged(tmp_path / "two") == pytest.approx(losses, rel=TOLERANCE)
    for name in ("gradient_norm", "validation_loss"):
        assert logged(tmp_path / "two", name) == pytest.approx(logged(tmp_path / "one", name), rel=10 * TOLERANCE)
    run(1, recipe, cut_back(tmp_path / "two", "two to one", 3), resume=True)
    assert logged(tmp_path / "two to one") == pytest.approx(losses, rel=TOLERANCE)
    run(2, recipe, cut_back(tmp_path / "one", "one to two", 3), resume=True)
    assert logged(tmp_path / "one to two") == pytest.approx(losses, rel=TOLERANCE)


def test_a_process_whose_documents_have_ended_waits_for_the_others(tmp_path: Path) -> None:
    rows = {"kind": "segments", "batch": 2, "length": 12, "epochs": 1}
    data = {"rows": rows, "validation": 0.0}
    fields = tiny_recipe(tmp_path, data=data, loop={"steps": 50}, evaluation={"every": 0})
    for text in sorted((tmp_path / "texts").iterdir())[2:]:
        text.unlink()
    (tmp_path / "texts" / "01.txt").write_text("A long text. " * 12, encoding="utf-8")
    recipe = write_recipe(tmp_path / "recipe.yaml", fields)
    run(1, recipe, tmp_path / "one")
    run(2, recipe, tmp_path / "two")
    assert logged(tmp_path / "two") == pytest.approx(logged(tmp_path / "one"), rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_are_one_with_packed_rows(tmp_path: Path, optimizer: str) -> None:
    recipe = recipe_file(tmp_path, optimizer={"name": optimizer, "lr": 0.01})
    run(1, recipe, tmp_path / "one")
    run(2, recipe, tmp_path / "two")
    assert logged(tmp_path / "two") == pytest.approx(logged(tmp_path / "one"), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("processes", "kill_at"),
    [(1, 5), pytest.param(1, 9, marks=pytest.mark.slow), pytest.param(2, 7, marks=pytest.mark.slow)],
)
def test_killed_and_resumed_ends_with_the_same_weights(tmp_path: Path, processes: int, kill_at: int) -> None:
    """SIGKILL as soon as a step is seen in the log, which is somewhere in the steps, saves or evaluations after it."""
    recipe = recipe_file(tmp_path, data=SEGMENTS, loop={"steps": 14}, checkpoint={"every": 2}, evaluation={"every": 4})
    run(processes, recipe, tmp_path / "whole")
    _run_and_kill(processes, recipe, tmp_path / "killed", kill_at)
    assert not (tmp_path / "killed" / "final").exists()
    run(processes, recipe, tmp_path / "killed", resume=True)
    one, other = (weights(tmp_path / name / "final") for name in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")


def _run_and_kill(processes: int, recipe: Path, out: Path, step: int) -> None:
    started = subprocess.Popen(
        command(processes, "train", recipe, "--out", out, "--quiet"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a group of its own, so that every process of it can be killed at once
    )
    while started.poll() is None and _last_step(out) < step:
        time.sleep(0.002)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def _last_step(out: Path) -> int:
    try:
        lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)
