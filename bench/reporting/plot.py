"""Horizontal bars on a logarithmic axis as an SVG file, without a plotting library.

Rates and times of one picture differ a thousandfold, so lengths are logarithms: a line for each decade. Bars of
one group have one colour, which a legend names; a thin line shows the smallest and the largest of all runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from danube_fast.bench.reporting.report import amount

__all__ = ["Bar", "bars", "write_bars"]

WIDTH = 800
LABEL_WIDTH = 290
LETTER_WIDTH = 7.0
VALUE_WIDTH = 120
ROW_HEIGHT = 24
BAR_HEIGHT = 16
TOP = 62
LEGEND_STEP = 130
CAPTION_HEIGHT = 22
FONT = 'font-family="sans-serif" font-size="13" role="img"'
COLOURS = ("#2f6db5", "#e08a2c", "#8a8f98")
CLOSE_TO_THE_AXIS = 1.5
"""A bar shorter than this factor would not be seen: then the axis begins a decade lower."""


class Bar(NamedTuple):
    """One of them."""

    label: str
    value: float
    group: str = ""
    low: float | None = None
    high: float | None = None
    """The smallest and the largest of several runs."""


def _decades(rows: Sequence[Bar]) -> tuple[int, int]:
    """Powers of ten where the axis begins and ends."""
    values = [x for row in rows for x in (row.value, row.low, row.high) if x and x > 0] or [1.0]
    low = math.floor(math.log10(min(values) / CLOSE_TO_THE_AXIS))
    return low, max(low + 1, math.ceil(math.log10(max(values))))


def bars(title: str, rows: Sequence[Bar], caption: str = "") -> str:
    """An SVG picture with a bar for each row."""
    bottom = TOP + ROW_HEIGHT * len(rows) + 10
    letters = max((len(row.label) for row in rows), default=0)
    left = max(LABEL_WIDTH, round(LETTER_WIDTH * letters) + 16)
    width = WIDTH + left - LABEL_WIDTH
    height = bottom + (CAPTION_HEIGHT if caption else 0)
    first, last = _decades(rows)
    decade = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) / (last - first)

    def at(value: float | None) -> float:
        return left + max(0.0, math.log10(value) - first if value and value > 0 else 0.0) * decade

    groups = list(dict.fromkeys(row.group for row in rows if row.group))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for index, group in enumerate(groups):
        x = left + LEGEND_STEP * index
        parts += [
            f'<circle cx="{x + 6}" cy="36" r="6" fill="{COLOURS[index % len(COLOURS)]}"/>',
            f'<text x="{x + 16}" y="41">{escape(group)}</text>',
        ]
    for power in range(first, last + 1):
        place, style = at(10.0**power), 'font-size="10" text-anchor="middle" fill="#777"'
        parts += [
            f'<path d="M{place:.1f} {TOP - 4}V{bottom - 8}" stroke="#ddd"/>',
            f'<text x="{place:.1f}" y="{TOP - 8}" {style}>{_power(power)}</text>',
        ]
    for index, row in enumerate(rows):
        y = TOP + ROW_HEIGHT * index
        colour = COLOURS[groups.index(row.group) % len(COLOURS)] if row.group else COLOURS[0]
        parts += _row(row, y, left, at, colour)
    if caption:
        parts.append(f'<text x="10" y="{bottom + 8}" font-size="11">{escape(caption)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _row(
    row: Bar, y: int, left: int, at: Callable[[float | None], float], colour: str
) -> list[str]:
    """Label, bar, range and value of one row."""
    end, middle = at(row.value), y + BAR_HEIGHT - 3
    parts = [
        f'<text x="{left - 8}" y="{middle}" text-anchor="end">{escape(row.label)}</text>',
        f'<rect x="{left}" y="{y}" width="{end - left:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>',
    ]
    if row.low is not None and row.high is not None:
        line = y + BAR_HEIGHT / 2
        parts.append(
            f'<line x1="{at(row.low):.1f}" y1="{line}" x2="{at(row.high):.1f}" y2="{line}" '
            'stroke="#222" stroke-width="1.5"/>'
        )
        end = max(end, at(row.high))
    return [*parts, f'<text x="{end + 6:.1f}" y="{middle}">{amount(row.value)}</text>']


def _power(power: int) -> str:
    """10, 100, 1 k, 10 k, ..."""
    for exponent, letter in ((9, " G"), (6, " M"), (3, " k")):
        if power >= exponent:
            return f"{10 ** (power - exponent)}{letter}"
    return f"{10.0**power:g}"


def write_bars(path: Path, title: str, rows: Sequence[Bar], caption: str = "") -> None:
    """Write the picture to a file."""
    path.write_text(bars(title, rows, caption))
