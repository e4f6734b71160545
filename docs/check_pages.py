"""Lists the pages of documentation and checks that every relative link in them leads somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    """README, tuning.md and everything in docs/ and requirements/, in reading order."""
    found = [ROOT / "README.md", ROOT / "tuning.md"]
    return (
        found + sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "requirements").glob("*.md"))
    )


def anchors(page: Path) -> set[str]:
    """The names that headings of a page can be linked by."""
    names = set()
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            words = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            names.add(words.replace(" ", "-"))
    return names


def broken_links(page: Path) -> list[str]:
    """One sentence for each relative link of `page` that leads nowhere."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    faults = []
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            faults.append(f"{page.relative_to(ROOT)}: {link} does not exist")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            faults.append(f"{page.relative_to(ROOT)}: {link} names no heading")
    return faults


def main() -> int:
    """Print the pages, then what is wrong with them; 1 if anything is."""
    faults = []
    for page in pages():
        heading = next(
            (x for x in page.read_text().splitlines() if x.startswith("# ")), "# (no title)"
        )
        if "--quiet" not in sys.argv:
            print(f"{page.relative_to(ROOT)!s:50} {heading[2:]}")
        faults += broken_links(page)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
