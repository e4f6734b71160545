"""Horizontal bars as an SVG file, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from danube_fast.bench.report import amount

__all__ = ["bars", "write_bars"]

WIDTH = 760
LABEL_WIDTH = 290
LETTER_WIDTH = 6.6
VALUE_WIDTH = 80
ROW_HEIGHT = 24
BAR_HEIGHT = 16
TOP = 40
CAPTION_HEIGHT = 22
FONT = 'font-family="sans-serif" font-size="13" role="img"'
FILL = 'fill="#2f6db5"'


def bars(title: str, rows: Sequence[tuple[str, float]], caption: str = "") -> str:
    """An SVG picture with a bar for each (label, value)."""
    bottom = TOP + ROW_HEIGHT * len(rows) + 10
    height = bottom + (CAPTION_HEIGHT if caption else 0)
    longest = max((value for _, value in rows), default=0.0) or 1.0
    letters = max((len(label) for label, _ in rows), default=0)
    label_width = max(LABEL_WIDTH, round(LETTER_WIDTH * letters) + 16)
    width = WIDTH + label_width - LABEL_WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for index, (label, value) in enumerate(rows):
        y = TOP + ROW_HEIGHT * index
        length = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) * value / longest
        middle = y + BAR_HEIGHT - 3
        parts += [
            f'<text x="{label_width - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{label_width}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" {FILL}/>',
            f'<text x="{label_width + length + 6:.1f}" y="{middle}">{amount(value)}</text>',
        ]
    if caption:
        parts.append(f'<text x="10" y="{bottom + 8}" font-size="11">{escape(caption)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write_bars(
    path: Path, title: str, rows: Sequence[tuple[str, float]], caption: str = ""
) -> None:
    """Write the picture to a file."""
    path.write_text(bars(title, rows, caption))
