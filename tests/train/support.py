"""Runs that take a second: a tiny model, a few sentences, and processes to train it in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

from atlas_memory.train import load_recipe, train

# Long enough for several segments, of several lengths, so that rows start new documents at different steps.
DOCUMENTS = 12
STEPS = 6


def write_texts(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(DOCUMENTS):
        lines = [f"Line {line} of text {number}: {number * line} is the answer.\n" for line in range(1 + number % 4)]
        (folder / f"{number:02d}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def tiny_recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    """Fields of a recipe; further sections replace or extend these."""
    fields: dict[str, Any] = {
        "model": {
            "preset": "titans",
            "backbone": "mag",
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "memory_heads": 2,
            "sliding_window": 5,
            "memory": {"key_width": 4, "expansion": 2, "chunk": 4},
        },
        "data": {
            "source": {"kind": "text", "path": str(write_texts(folder / "texts"))},
            "rows": {"batch": 4, "length": 12},
            "validation": 0.2,
            "cache": str(folder / "cache"),
        },
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 2},
        "loop": {"steps": STEPS},
        "evaluation": {"every": 3, "batches": 2},
        "checkpoint": {"every": 1, "keep": 3},
        "logging": {"every": 1, "tensorboard": False},
    }
    for name, section in sections.items():
        fields[name] = {**fields.get(name, {}), **section} if isinstance(section, dict) else section
    return fields


SEGMENTS = {"rows": {"kind": "segments", "batch": 4, "length": 12}}


def write_recipe(path: Path, fields: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
    return path


def command(processes: int, *arguments: str | Path) -> list[str]:
    """`atlas-memory` in so many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return [sys.executable, *launcher, "-m", "atlas_memory", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def run(processes: int, recipe: Path, out: Path, resume: bool = False) -> None:
    """Train to the end: here, or in so many processes of their own."""
    if processes == 1:
        train(load_recipe(recipe), out, resume=resume, progress=False)
        return
    arguments = ["train", recipe, "--out", out, "--quiet", *(["--resume"] if resume else [])]
    finished = subprocess.run(command(processes, *arguments), env=environment(), capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def logged(run_folder: Path, name: str = "loss") -> list[float]:
    lines = [json.loads(line) for line in (run_folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line[name] for line in lines if name in line]


def cut_back(run: Path, name: str, step: int) -> Path:
    """A copy as it was after a step, but for the log, which a crash leaves as it is."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "final")
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return copy
