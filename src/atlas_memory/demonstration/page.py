"""The page that a demo leaves behind."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from atlas_memory.demonstration.show import Answered, Reading, Show
from atlas_memory.files import write_whole

TEMPLATE = Path(__file__).with_name("page.html")
WITH_MEMORY, WITHOUT = "with a long-term memory", "without: a sliding window"


def write_page(
    out: Path,
    facts: Sequence[str],
    answers: Sequence[tuple[Answered, Answered]],
    figures: Mapping[str, str],
    numbers: Mapping[str, Any],
) -> None:
    """answers: with a memory and without. figures: file → caption. numbers: of the template."""
    filled = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        numbers,
        with_memory=WITH_MEMORY,
        without=WITHOUT,
        facts="".join(f"<li>{html.escape(fact)}</li>" for fact in facts),
        rows="".join(_row(ours, rival) for ours, rival in answers),
        figures="".join(_figure(file, caption) for file, caption in figures.items()),
    )
    write_whole(out, filled)


def numbers(length: int, show: Show, reading: Reading, rival: Show, near: list[Answered]) -> dict[str, str]:
    """Those of the template. near: what the rival says to the facts alone."""
    return {
        "length": f"{length:,}",
        "parameters": f"{show.model.num_parameters():,}",
        "own_tokens": f"{reading.tokens:,}",
        "seconds": f"{reading.seconds:,.1f}",
        "speed": f"{reading.gpt2_tokens / reading.seconds:,.0f}",
        "state_bytes": f"{reading.state_bytes:,}",
        "rival_parameters": f"{rival.model.num_parameters():,}",
        "rival_reach": f"{rival.reach:,}",
        "rival_near": f"{sum(answer.right for answer in near)} of {len(near)}",
    }


def _row(ours: Answered, rival: Answered) -> str:
    cells = [html.escape(ours.question.text), html.escape(ours.question.answer)]
    said = [f'<td class="{"right" if a.right else "wrong"}">{html.escape(a.said) or "–"}</td>' for a in (ours, rival)]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}{''.join(said)}</tr>"


def _figure(file: str, caption: str) -> str:
    text = html.escape(caption)
    return f'<figure><img src="{html.escape(file)}" alt="{text}"><figcaption>{text}</figcaption></figure>'
