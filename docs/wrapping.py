"""Wraps the prose of Markdown pages at one width. Tables, code, headings and pictures stay as they are."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

WIDTH = 120
ITEM = re.compile(r"(\s*)([-*]|\d+\.) +")
FIXED = re.compile(r"#|\||<|!\[|\[[^]]+\]: | {4,}")
"""Beginnings of lines that are no prose."""
GLUED = re.compile(r" (?=(?:[-+*#>|]|\d+[.)]) )")
"""Spaces before what would begin a list, a heading or a table if it began a line."""


def too_wide(text: str) -> Iterator[int]:
    """Numbers of the lines of a page that are wider than the width, tables left out."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > WIDTH and not line.startswith("|") and " " in line.strip():
            yield number


def wrapped(text: str) -> str:
    """The page with every paragraph and every item of a list filled anew."""
    done: list[str] = []
    prose: list[str] = []
    in_code = False

    def fill() -> None:
        if prose:
            item = ITEM.match(prose[0])
            indent = " " * (item.end() if item else len(prose[0]) - len(prose[0].lstrip()))
            words = " ".join(line.strip() for line in prose)
            first = item[0].rstrip() + " " if item else indent
            words = words[len(item[0].strip()) :].strip() if item else words
            filled = textwrap.fill(
                GLUED.sub("\0", words), WIDTH, initial_indent=first, subsequent_indent=indent,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
            done.extend(filled.replace("\0", " ").split("\n"))
            prose.clear()

    for line in text.splitlines():
        begins_code = line.lstrip().startswith("```")
        in_item = bool(prose) and (ITEM.match(prose[0]) or prose[0].startswith(" "))
        fixed = FIXED.match(line) and not (in_item and line.startswith("  ") and line.strip())
        if begins_code or in_code or not line.strip() or fixed:
            fill()
            done.append(line)
            in_code ^= begins_code
            continue
        if ITEM.match(line):
            fill()
        prose.append(line)
    fill()
    return "\n".join(done) + "\n"
