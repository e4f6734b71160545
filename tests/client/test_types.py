"""What a type checker and an editor see: the examples of the pages pass, mistakes do not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK_SECONDS = 600
"""mypy looks through the whole package when it has no cache yet."""

MISTAKES = """
import danube_fast

with danube_fast.connect(transport="carrier pigeon") as client:  # transport
    client.producer("/default/t", dispatch="relaible")  # dispatch
    client.producer("/default/t", durability="disk")  # durability
    client.producer("/default/t", linger_ms=3)  # option
    client.publish("/default/t", b"x", kee="k")  # field
    consumer = client.consumer("/default/t", subscription="s", type="shaerd")  # type
    client.consumer("/default/t", subscription="s", failure_policy={"retries": 3})  # policy
    client.subscribe("/default/t", "s", print, permit_messages=5)  # handler option
    consumer.seek(1.5)  # position


async def twin() -> None:
    async with danube_fast.connect_async() as client:
        async with client.consumer("/default/t", subscription="s", type="shaerd"):  # twin
            pass
        async with client.producer("/default/t") as producer:
            await producer.publish("text")  # payload
"""


def check(path: Path) -> str:
    """What `mypy --strict` says of a program that uses the package."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(path)],
        cwd=ROOT,  # the project's settings are strict, and its cache saves half a minute
        capture_output=True,
        text=True,
        timeout=CHECK_SECONDS,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.timeout(CHECK_SECONDS + 60)
def test_the_examples_of_the_pages_are_typed(tmp_path: Path) -> None:
    text = "".join((ROOT / page).read_text() for page in ("README.md", "docs/guide.md"))
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 2
    program = tmp_path / "readme_examples.py"
    program.write_text("\n".join(blocks))
    assert check(program) == ""


@pytest.mark.timeout(CHECK_SECONDS + 60)
def test_a_mistyped_option_is_refused_by_the_type_checker(tmp_path: Path) -> None:
    program = tmp_path / "mistakes.py"
    program.write_text(MISTAKES)
    said = check(program)
    lines = MISTAKES.splitlines()
    expected = {number for number, line in enumerate(lines, 1) if "  # " in line}
    found = {int(number) for number in re.findall(r"mistakes\.py:(\d+): error", said)}
    assert found == expected, said
