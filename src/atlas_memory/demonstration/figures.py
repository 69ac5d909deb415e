"""What a demo measures and draws: one fact at every depth of texts, and accuracy against length."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from atlas_memory.models.shipped import model_folder, results_folder
from atlas_memory.tasks import figures
from atlas_memory.tasks.evaluation import Request, evaluate
from atlas_memory.tasks.results import Report
from atlas_memory.tasks.samples import Cell
from atlas_memory.tasks.work import work_folder

SHIPPED = "shipped"  # the model whose accuracies are in the package
CURVES, NEEDLE = "accuracy.png", "needle.png"
MEASURED = "needle.json"  # the first file that a demo leaves in its folder
LENGTHS, SAMPLES = (1000, 4000, 16_000), 4


def make_figures(folder: Path, cells: Sequence[Cell], out: Path, book: str, precision: str) -> dict[str, str]:
    """Files in `out` and what they show, of the model in `folder`. cells: `scene.needle_cells` of that book."""
    shutil.rmtree(work_folder(out / MEASURED), ignore_errors=True)  # of a demo that was stopped: it takes seconds
    settings = {"book": book, "lengths": LENGTHS}
    report = evaluate(Request("one fact", folder, cells, out / MEASURED, settings, batch=SAMPLES, precision=precision))
    if folder.resolve() == model_folder(SHIPPED).resolve():
        reports, curves = _shipped(), "BABILong, accuracy of the shipped model against length (docs/results.md)"
    else:
        reports, curves = {"one fact, all depths": report}, "One fact, accuracy against length, measured just now"
    figures.compare(reports, out / CURVES)
    figures.draw(report, out / NEEDLE)
    return {CURVES: curves, NEEDLE: "One fact at every depth of texts of different lengths, measured just now"}


def _shipped() -> dict[str, Report]:
    files = sorted(results_folder().glob("*.json"))
    return {file.stem: Report.from_dict(json.loads(file.read_text(encoding="utf-8"))) for file in files}
