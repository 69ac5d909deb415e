"""python -m benchmarks [names…] [--quick] [--out FILE.json]; python -m benchmarks --markdown FILE.json"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import machine, measurements, report
from benchmarks.registry import Run, chosen, measure

RESULTS = Path(__file__).parent / "results.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, and compare with the targets.")
    parser.add_argument("names", nargs="*", help="measurements, or the first part of their names; default: all")
    parser.add_argument("--quick", action="store_true", help="few repetitions: does everything run?")
    parser.add_argument("--out", type=Path, help=f"where to write JSON; default for a full run: {RESULTS.name}")
    parser.add_argument("--threads", type=int, default=2, help="of torch, here and in all children; default: 2")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--markdown", type=Path, metavar="FILE.json", help="print a result as markdown and stop")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.markdown:
        print(report.markdown(json.loads(options.markdown.read_text())))
        return 0
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for the children
    measurements.enter_all()
    try:
        entries = chosen(options.names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(entry.name for entry in entries))
        return 0
    # A part of the measurements never overwrites the results of all unless that is asked for.
    path = options.out or (None if options.names or options.quick else RESULTS)
    console = Console()
    result = {"machine": machine.describe(), "quick": options.quick, "records": []}
    for entry in entries:
        record = measure(entry, Run(options.quick))
        result["records"].append(record)
        console.print(
            f"{entry.name}: {report.row(record)[1]}  [dim]{record['took_seconds']:.0f} s[/dim]", soft_wrap=True
        )
        if path:
            report.write(result, path)
    report.terminal_table(result["records"], console)
    failed = [record for record in result["records"] if record["status"] == "failed"]
    for record in failed:
        console.print(f"{record['name']} failed:\n{record['note']}", style="red", markup=False)
    return 1 if failed else 0


sys.exit(main())
