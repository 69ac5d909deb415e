"""Records as a table on the terminal, as markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# A spread between repetitions, or a load, above these is shown: the machine had something else to do. Two threads that
# wait for each other on busy cores take many times as long, and that with hardly any spread.
NOISY = 0.1
BUSY = 2.75

COLUMNS = ("what", "measured", "target", "reached")

FORMATS: dict[str, Callable[[float], str]] = {
    "×": lambda value: f"{value:.0f}×" if value >= 100 else f"{value:.2f}×",
    "%": lambda value: f"{100 * value:.0f} %",
    "1/": lambda value: f"1/{1 / value:.3g}" if 0 < value < 0.67 else f"{value:.2f}×",
    "tokens/s": lambda value: f"{value:,.0f} tokens/s",
    "MB": lambda value: f"{value / 1e6:.1f} MB",
}


def row(record: dict[str, Any]) -> tuple[str, str, str, str]:
    show, target = FORMATS[record["unit"]], record["target"]
    wanted = f"{target['relation']} {show(target['limit'])}" if target else "report"
    if record["status"] != "measured":
        reason = (record["note"].strip().splitlines() or ["unknown"])[-1]
        return record["what"], f"{record['status']}: {reason}", wanted, "–"
    what = f"{record['what']} ({record['note']})" if record["note"] else record["what"]
    reached = {True: "yes", False: "no", None: "–"}[record["reached"]]
    return what, show(record["value"]) + _doubts(record), wanted, reached


def _doubts(record: dict[str, Any]) -> str:
    noisy = f" ±{100 * record['noise']:.0f} %" if (record["noise"] or 0) > NOISY else ""
    return noisy + (f" (machine busy, load {record['load']:.1f})" if record["load"] > BUSY else "")


def terminal_table(records: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(*COLUMNS, show_lines=False)
    styles = {"yes": "green", "no": "red"}
    for record in records:
        cells = row(record)
        table.add_row(*cells, style=styles.get(cells[-1]))
    console.print(table)


def markdown(result: dict[str, Any]) -> str:
    """Of a result as `write` wrote it."""
    machine = result["machine"]
    lines = [
        f"{machine['cpu']}, {machine['threads']} threads of {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['date'][:10]}, revision {machine['revision']}."
    ]
    if result["quick"]:
        lines.append("**A quick run: it shows that the measurements work; the numbers are not results.**")
    lines += ["", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row(r))} |" for r in result["records"]]
    return "\n".join(lines)


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
