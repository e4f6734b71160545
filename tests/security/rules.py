"""A package with an authorizer, as pip would have installed it: it denies by a rule, fails, or takes its time."""

from __future__ import annotations

from pathlib import Path

__all__ = ["install"]

_MODULE = '''
"""Denies what its file says, a line each: PRINCIPAL PERMISSION PREFIX-OF-RESOURCE, or a word about a fault."""

import os
import time

from danube_fast.errors import PermissionDenied


class Rules:
    def __init__(self, path):
        self.path = path
        self.read_ns = 0
        self.version = 1
        self.lines = []

    def _look(self):
        found = os.stat(self.path).st_mtime_ns
        if found != self.read_ns:
            self.read_ns = found
            with open(self.path) as file:
                self.lines = [line.split() for line in file]
            return True
        return False

    def authorize(self, principal, permission, resource):
        self._look()
        with open(self.path + ".asked", "a") as log:
            print(os.getpid(), principal, permission, resource, file=log)
        for words in self.lines:
            if words == ["fault"] and principal != "ann":
                raise ZeroDivisionError("a fault of the rules")
            if words == ["slow"]:
                time.sleep(0.002)
            if len(words) == 3 and (principal, permission) == (words[0], words[1]) and resource.startswith(words[2]):
                raise PermissionDenied(f"{principal} may not {permission} {resource}: a rule of the house")


class Live(Rules):
    """Its version follows its file."""

    @property
    def version(self):
        self._look()
        return self.read_ns

    @version.setter
    def version(self, value):
        pass


def broken(argument):
    raise OSError("no rules")


def nothing(argument):
    return argument


class Bad:
    version = "three"

    def __init__(self, argument):
        pass

    def authorize(self, principal, permission, resource):
        raise KeyError(resource)
'''
_ENTRY_POINTS = """[danube_fast.authorizers]
rules = house_rules:Rules
live = house_rules:Live
bad = house_rules:Bad
broken = house_rules:broken
nothing = house_rules:nothing
gone = house_rules_gone:Rules
"""


def install(folder: Path) -> None:
    """Put the package into a folder, which goes onto the module path."""
    folder.mkdir(exist_ok=True)
    (folder / "house_rules.py").write_text(_MODULE)
    info = folder / "house_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-rules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
