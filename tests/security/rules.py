"""Packages with an authorizer and with an authenticator, as pip would have installed them: they decide by a rule, fail, or
take their time."""

from __future__ import annotations

from pathlib import Path

__all__ = ["install", "install_logins", "write_rules"]

_MODULE = '''
"""Denies what its file says, a line each: PRINCIPAL PERMISSION PREFIX-OF-RESOURCE, or a word about a fault."""

import os
import threading
import time

from danube_fast.errors import PermissionDenied


class Rules:
    def __init__(self, path):
        self.path = path
        self.lock = threading.Lock()
        self.read_ns = 0
        self.version = 1
        self.lines = []

    def _look(self):
        with self.lock:  # several threads ask
            found = os.stat(self.path).st_mtime_ns
            if found != self.read_ns:
                with open(self.path) as file:
                    self.lines = [line.split() for line in file]
                self.read_ns = found

    def authorize(self, principal, permission, resource):
        self._look()
        with open(self.path + ".asked", "a") as log:
            print(os.getpid(), principal, permission, resource, file=log)
        for words in self.lines:
            if words == ["fault"] and principal != "ann":
                raise ZeroDivisionError("a fault of the rules")
            while words == ["hang", principal] and not os.path.exists(self.path + ".go"):
                time.sleep(0.02)
            if words == ["slow"]:
                time.sleep(0.002)
            if len(words) == 3 and (principal, permission) == (words[0], words[1]) and resource.startswith(words[2]):
                raise PermissionDenied(f"{principal} may not {permission} {resource}: a rule of the house")

    def lookup_scopes(self, principal):
        """Of lines PRINCIPAL shows SCOPE; without one all."""
        self._look()
        with open(self.path + ".asked", "a") as log:
            print(os.getpid(), principal, "shows", "-", file=log)
        while ["hang", principal] in self.lines and not os.path.exists(self.path + ".go"):
            time.sleep(0.02)
        if ["fault"] in self.lines and principal != "ann":
            raise ZeroDivisionError("a fault of the rules")
        found = [words[2] for words in self.lines if words[:2] == [principal, "shows"]]
        return found or ["cluster"]


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


def hanging(argument):
    """In all processes, or in all but so many: each that is not to hang puts a file there."""
    path, _, count = argument.partition("#")
    for number in range(int(count or 0)):
        try:
            open(f"{path}.{number}", "x").close()
        except FileExistsError:
            continue
        return Rules(path)
    threading.Event().wait()


class Later:
    def __init__(self, argument):
        pass

    async def authorize(self, principal, permission, resource):
        pass


class Blind:
    def __init__(self, argument):
        pass

    def authorize(self, principal, permission, resource):
        pass


class Bad:
    version = "three"

    def __init__(self, argument):
        pass

    def authorize(self, principal, permission, resource):
        raise KeyError(resource)

    def lookup_scopes(self, principal):
        raise KeyError(principal)
'''
_ENTRY_POINTS = """[danube_fast.authorizers]
rules = house_rules:Rules
live = house_rules:Live
bad = house_rules:Bad
broken = house_rules:broken
later = house_rules:Later
blind = house_rules:Blind
nothing = house_rules:nothing
hanging = house_rules:hanging
gone = house_rules_gone:Rules
"""


_LOGINS = '''
"""Takes secrets that say what to do: a word, a colon, and more. What it was asked is in its file, without secrets."""

import os
import sys
import threading
import time

from danube_fast.errors import PermissionDenied, Unavailable
from danube_fast.security.authenticators import Authenticated


class Logins:
    def __init__(self, path):
        self.path = path

    def authenticate(self, secret, address):
        word, _, rest = secret.partition(":")
        with open(self.path, "a") as file:
            print(word, address, threading.current_thread() is threading.main_thread(), file=file)
        return getattr(self, word, lambda rest: None)(rest)

    def user(self, rest):
        name, *groups = rest.split("+")
        return Authenticated(name, groups)

    def ends(self, rest):
        seconds, name = rest.split("+")
        return Authenticated(name, (), time.time_ns() + int(float(seconds) * 1e9))

    def hang(self, rest):
        while not os.path.exists(self.path + ".go"):
            time.sleep(0.02)
        return Authenticated(rest)

    def fault(self, rest):
        raise ZeroDivisionError("a fault, and its text has the secret " + rest)

    def leave(self, rest):
        sys.exit(3)

    def no(self, rest):
        raise PermissionDenied(f"no:{rest} is locked out")

    def down(self, rest):
        raise Unavailable("the directory is down")

    def garbage(self, rest):
        return {"list": [rest], "text": rest, "true": True, "class": Authenticated}[rest]

    def odd(self, rest):
        return {
            "principal": Authenticated(["pia"]), "number": Authenticated(7), "groups": Authenticated("pia", "auditors"),
            "set": Authenticated("pia", {"auditors"}),
            "many": Authenticated("pia", [str(number) for number in range(300)]),
            "float": Authenticated("pia", (), time.time() + 60), "true": Authenticated("pia", (), True),
            "negative": Authenticated("pia", (), -1), "past": Authenticated("pia", (), int(time.time()) + 60),
        }[rest]


class Kept(Logins):
    def __init__(self, path):
        super().__init__(path)
        if os.path.exists(path + ".broken"):
            raise ConnectionError("no directory\\nbehind " + path)


def broken(argument):
    raise OSError("no directory\\nfor " + argument.rpartition(":")[2])


def leaving(argument):
    sys.exit(argument)


def hanging(argument):
    threading.Event().wait()
'''
_LOGINS_ENTRY_POINTS = """[danube_fast.authenticators]
logins = house_logins:Logins
kept = house_logins:Kept
broken = house_logins:broken
leaving = house_logins:leaving
hanging = house_logins:hanging
nothing = house_logins:Authenticated
gone = house_logins_gone:Logins
bad name = house_logins:Logins
"""


def write_rules(path: Path, text: str) -> None:
    """Change the rules at once: none are read while they are half written."""
    whole = path.with_suffix(".new")
    whole.write_text(text)
    whole.replace(path)


def install(folder: Path) -> None:
    """Put the package with the authorizer into a folder, which goes onto the module path."""
    _install(folder, "house_rules", _MODULE, _ENTRY_POINTS)


def install_logins(folder: Path) -> None:
    """Put the package with the authenticator into a folder, which goes onto the module path."""
    _install(folder, "house_logins", _LOGINS, _LOGINS_ENTRY_POINTS)


def _install(folder: Path, name: str, module: str, entry_points: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
    (info / "METADATA").write_text(text)
    (info / "entry_points.txt").write_text(entry_points)
