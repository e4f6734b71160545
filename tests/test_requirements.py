"""The pinned requirements cover pyproject.toml, carry hashes and name no package index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+) \\$", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    return {
        canonicalize_name(package): version
        for package, version in PIN.findall((ROOT / "requirements" / name).read_text())
    }


@pytest.mark.parametrize("name", ["dev.txt", "demo.txt", "servers.txt", "spark.txt"])
def test_every_pin_has_a_hash_and_no_line_names_an_index(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text()
    blocks = re.split(r"\n(?=[A-Za-z0-9])", text.strip())
    assert len(blocks) == len(pins(name))
    for block in blocks:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block.splitlines()[0]
    assert "://" not in text
    assert not re.search(r"--(extra-)?index|--find-links|--trusted-host", text)


def test_pins_cover_what_run_installs() -> None:
    extras = PROJECT["optional-dependencies"]
    pinned = pins("spark.txt") | pins("dev.txt")
    named = [
        *extras["arrow"],
        *extras["dev"],
        *extras["spark"],
        *extras["lakehouse"],
        *extras["readers"],
    ]
    for line in [*PROJECT["dependencies"], *named]:
        requirement = Requirement(line)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{line} is not pinned: see requirements/README.md"
        assert requirement.specifier.contains(version), f"{line} is pinned to {version}"


def test_the_demo_extra_and_its_pin_agree() -> None:
    (line,) = PROJECT["optional-dependencies"]["demo"]
    name, _, version = line.partition("==")
    assert pins("demo.txt") == {name: version}


def test_packages_that_are_pinned_twice_have_one_version() -> None:
    pinned = pins("dev.txt")
    for package, version in pins("spark.txt").items():
        assert pinned.get(package, version) == version, package
