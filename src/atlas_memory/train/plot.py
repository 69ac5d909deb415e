"""Curves of runs as a PNG file."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas_memory.files import write_whole
from atlas_memory.train.runs import Run

DEFAULT = ("loss", "validation_loss", "lr")


def draw(runs: Sequence[Run], out: Path, quantities: Sequence[str] = DEFAULT) -> None:
    """One panel for each quantity, one line for each run."""
    logged = dict.fromkeys(name for run in runs for line in run.log for name in line if name != "step")
    for quantity in quantities if tuple(quantities) != DEFAULT else ():
        if quantity not in logged:
            raise ValueError(f"quantity={quantity!r} is in no log; logged: {', '.join(logged)}.")
    shown = [quantity for quantity in quantities if quantity in logged]
    if not shown:
        raise ValueError("the runs have logged nothing yet.")
    figure = figure_class()(figsize=(6 * len(shown), 4), layout="constrained")
    for place, quantity in enumerate(shown, 1):
        axes = figure.add_subplot(1, len(shown), place, xlabel="step", ylabel=quantity)
        for run in runs:
            steps, values = run.values(quantity)
            axes.plot(steps, values, label=run.name, marker="." if len(steps) < 20 else None)
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, out)


def save_figure(figure: Any, path: Path) -> None:
    """A file, whole or not at all; PNG unless its name says otherwise."""
    image, kind = io.BytesIO(), path.suffix.lstrip(".") or "png"
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise ValueError(f"out={str(path)!r} must end in one of .{', .'.join(known)}.")
    figure.savefig(image, format=kind, dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, image.getvalue())


def figure_class() -> Any:
    """Without pyplot: no window, no global state."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'atlas-memory[figures]'.") from error
