"""Lists the pages of documentation and checks them; with --write, makes anew what can be made.

links      every relative link leads somewhere
width      prose is wrapped (wrapping.py)
names      what architecture.md names in the tree is there
drift      api.md says what the docstrings say, tuning.md what the settings are
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import api_page
import setting_tables
from wrapping import WIDTH, too_wide, wrapped

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAME = re.compile(r"`([\w.]+/[\w./]*)`")
DRAWN = re.compile(r"(?<![\w/.<-])[a-z_]+/[a-z_]+(?![\w/.])")
"""Names in drawings."""
ARCHITECTURE, API, TUNING = (
    ROOT / name for name in ("docs/architecture.md", "docs/api.md", "tuning.md")
)
VAGUE = re.compile(r"\b(somebody|nobody|whoever|anybody|everybody)\b", re.IGNORECASE)
LEFT_ALONE = ("docs/status.md", "docs/decisions")
"""Pages whose lines are as wide as they like, and whose words are their own, as yet."""
MADE: dict[Path, Callable[[str], str]] = {
    API: lambda text: api_page.page(),
    TUNING: setting_tables.filled,
}
"""Page -> what it should be, of what it is."""


def pages() -> list[Path]:
    """README, tuning.md and everything in docs/ and requirements/, in reading order."""
    found = [ROOT / "README.md", ROOT / "tuning.md"]
    return (
        found + sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "requirements").glob("*.md"))
    )


def name_of(page: Path) -> str:
    """Where it is, from the root on."""
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The names that headings of a page can be linked by."""
    names = set()
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            words = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            names.add(words.replace(" ", "-"))
    return names


def broken_links(page: Path) -> Iterator[str]:
    """One sentence for each relative link of `page` that leads nowhere."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{name_of(page)}: {link} does not exist"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{name_of(page)}: {link} names no heading"


def wide_lines(page: Path) -> Iterator[str]:
    """One sentence for each line that should have been wrapped."""
    if not name_of(page).startswith(LEFT_ALONE):
        for number in too_wide(page.read_text()):
            yield f"{name_of(page)}:{number} is wider than {WIDTH}; `./run docs --write` wraps it"


def vague_words(page: Path) -> Iterator[str]:
    """One sentence for each word that hides who acts."""
    if not name_of(page).startswith(LEFT_ALONE):
        for match in VAGUE.finditer(page.read_text()):
            yield f"{name_of(page)}: {match[0]!r} hides who acts: a client, a worker, a subscription"


def unknown_names() -> Iterator[str]:
    """One sentence for each `folder/file` of architecture.md that is not in the tree."""
    tree = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for folder in ("danube_fast", "workers")
        for path in (ROOT / folder).rglob("*")
        if "__pycache__" not in path.parts
    }
    text = ARCHITECTURE.read_text()
    drawings = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    for name in [*NAME.findall(text), *DRAWN.findall("".join(drawings))]:
        end = "/" + name.strip("/").removesuffix(".py")
        if not any(f"/{path}".endswith(end) for path in tree):
            yield f"{name_of(ARCHITECTURE)}: {name} is not in the tree"


def drifted() -> Iterator[str]:
    """One sentence for each page that is not what the code would make of it."""
    for page, made in MADE.items():
        text = page.read_text() if page.exists() else ""
        if text != wrapped(made(text)):
            yield f"{name_of(page)} differs from the code; `./run docs --write` makes it anew"


def write() -> None:
    """Make the generated pages anew, and wrap all that are wrapped."""
    for page, made in MADE.items():
        page.write_text(made(page.read_text() if page.exists() else ""))
    for page in pages():
        text = page.read_text()
        if not name_of(page).startswith(LEFT_ALONE) and wrapped(text) != text:
            page.write_text(wrapped(text))


def main() -> int:
    """Print the pages, then what is wrong with them; 1 if anything is."""
    if "--write" in sys.argv:
        write()
    faults = [*unknown_names(), *drifted()]
    for page in pages():
        heading = next(
            (x for x in page.read_text().splitlines() if x.startswith("# ")), "# (no title)"
        )
        if "--quiet" not in sys.argv:
            print(f"{name_of(page):50} {heading[2:]}")
        faults += [*broken_links(page), *wide_lines(page), *vague_words(page)]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
