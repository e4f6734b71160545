"""Contexts: brokers under names, and how to come into them. One file of this user, `danube-fast/contexts.toml`.

    current = "prod"

    [contexts.prod]
    url = "danube://broker.example:6650"
    server_key = ["LmZ$WkjZ..."]
    key_file = "/srv/keys/ann.key"

A value of a command line is, in this order, the one of its option, of the environment, of the context in use, or the
default; but a way in comes from one place as a whole. The context in use is named by `--context`, by DANUBE_CONTEXT, or
by `danube-fast context use`. There are no secrets in the file, only paths of files that hold some; but who writes it leads this user to another broker.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from danube_fast.config import CLIENT_MARK
from danube_fast.descriptors import open_file
from danube_fast.durable import sync_directory
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument, NotFound
from danube_fast.security.private_files import PrivateFile, read_private, write_new

__all__ = [
    "NO_CONTEXT",
    "WAY_IN",
    "BrokerContext",
    "ContextFile",
    "Value",
    "choose",
    "chosen_name",
    "complete_contexts",
    "fields_of",
    "value_of",
    "values",
    "values_of",
]

NO_CONTEXT = "none"
"""In place of a name: no context is in use."""
VARIABLE = "DANUBE_CONTEXT"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_FILE_BYTES_MAX = 1 << 20
_FOLDER_MODE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_HEAD = "# Contexts of danube-fast; change them with: danube-fast context add\n"
WAY_IN = ("key_file", "sign_on", "token_file")
"""Values that come from one place: where the environment has one of them, those of the context do not count. A token of
the context never goes to an address of the environment."""


class BrokerContext(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A broker, and how to come in. Empty values are not set."""

    url: str = ""
    server_key: list[str] = []
    key_file: str = ""
    sign_on: str = ""
    tls: str = ""
    token_file: str = ""
    server_uid: str = ""


FIELDS = BrokerContext.__struct_fields__


class Value(NamedTuple):
    """A value, and where it is from: environment, context or default."""

    text: str
    source: str


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """The file."""

    current: str = ""
    contexts: dict[str, BrokerContext] = {}


class ContextFile:
    """The contexts of this user."""

    def __init__(self, path: Path, stored: _Stored) -> None:
        self.path, self._stored = path, stored

    @classmethod
    def read(cls) -> ContextFile:
        """Read the file; without one there are no contexts. Raises FailedPrecondition, InvalidArgument."""
        path = _path()
        if not os.path.lexists(path):
            return cls(path, _Stored())
        _check_folder(path.parent)
        content = read_private(
            path, PrivateFile("file of contexts", "repair it", bytes_max=_FILE_BYTES_MAX)
        )
        try:
            stored = msgspec.convert(tomllib.loads(content.decode()), _Stored)
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise InvalidArgument(f"{path} is no file of contexts ({error}); repair it") from None
        return cls(path, stored)

    @classmethod
    @contextlib.contextmanager
    def changing(cls) -> Iterator[ContextFile]:
        """Read the file, and write it at the end; commands that change it at the same time wait for each other. Raises
        as `read` and `write`."""
        folder = _path().parent
        try:
            folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            # the folder and not the file: that is another one after each change
            locked = open_file(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _cannot_write(_path(), error) from error
        try:
            fcntl.flock(locked, fcntl.LOCK_EX)
            file = cls.read()
            yield file
            file.write()
        finally:
            os.close(locked)

    @property
    def current(self) -> str:
        """Name of the context that is used if no other is named; empty: none."""
        return self._stored.current

    @property
    def names(self) -> list[str]:
        """Names of all contexts, in order."""
        return sorted(self._stored.contexts)

    def get(self, name: str) -> BrokerContext:
        """Return a context. Raises NotFound."""
        found = self._stored.contexts.get(name)
        if found is None:
            raise NotFound(f"there is no context {name!a:.100}; see: danube-fast context list")
        return found

    def put(self, name: str, changes: Mapping[str, str | list[str]]) -> BrokerContext:
        """Make a context, or change one; what is not in `changes` stays. Raises InvalidArgument."""
        if not _NAME.match(name) or name == NO_CONTEXT:
            raise InvalidArgument(
                f"{name!a:.100} is not a name of a context; give 1 to 64 letters, digits, '_', '.' or '-', and not "
                f"{NO_CONTEXT!r}"
            )
        _check(changes)
        known = self._stored.contexts.get(name, BrokerContext())
        made = self._stored.contexts[name] = msgspec.structs.replace(known, **changes)
        return made

    def use(self, name: str) -> None:
        """Use a context from now on, or none. Raises NotFound."""
        if name == NO_CONTEXT:
            name = ""
        else:
            self.get(name)
        self._stored.current = name

    def remove(self, name: str) -> None:
        """Remove a context. Raises NotFound."""
        self.get(name)
        del self._stored.contexts[name]
        if self._stored.current == name:
            self._stored.current = ""

    def write(self) -> None:
        """Write the file, for its owner alone. Raises FailedPrecondition."""
        path = self.path
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            _check_folder(path.parent)
            write_new(beside, _text_of(self._stored).encode())
            try:
                beside.replace(path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
            sync_directory(path.parent)
        except OSError as error:
            raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> FailedPrecondition:
    return FailedPrecondition(f"cannot write {path}: {error}; see to the permissions of its folder")


def _path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # a relative one is to be ignored, by the specification of base directories
    folder = Path(base) if Path(base).is_absolute() else Path.home() / ".config"
    return folder / "danube-fast" / "contexts.toml"


def _check_folder(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & _OTHERS_WRITE:
        raise FailedPrecondition(
            f"other users may put files into {folder}: run `chmod 700 {folder}`, and look at what is in it"
        )


def _check(changes: Mapping[str, str | list[str]]) -> None:
    """Check values of a context. Raises InvalidArgument that repeats none that may be a secret."""
    from danube_fast.client.link.url import parse_url
    from danube_fast.client.values.access import check_path, check_user
    from danube_fast.security.curve import is_public_key

    for name, value in changes.items():
        for text in value if isinstance(value, list) else [value]:
            if not text.isprintable():
                raise InvalidArgument(
                    f"{name} is not a line of text; write it without control characters"
                )
            if name == "url" and text:
                parse_url(text)
            if name == "server_key" and not is_public_key(text):
                raise InvalidArgument(
                    "server_key is not the public key of a broker; give the 40 characters that its ready line shows"
                )
            if name == "sign_on" and text and not text.startswith("https://"):
                raise InvalidArgument("sign_on is not an address; write https://HOST:PORT")
            if name in ("key_file", "token_file"):
                check_path(text, name)
            if name == "server_uid":
                check_user(text, name)


def _text_of(stored: _Stored) -> str:
    """Write the file's text: strings and lists of strings, in tables."""
    parts = [_HEAD]
    if stored.current:
        parts.append(f"current = {_quoted(stored.current)}\n")
    for name, context in sorted(stored.contexts.items()):
        parts.append(f"\n[contexts.{_quoted(name)}]\n")
        for field in FIELDS:
            value = getattr(context, field)
            if value:
                text = (
                    f"[{', '.join(map(_quoted, value))}]"
                    if isinstance(value, list)
                    else _quoted(value)
                )
                parts.append(f"{field} = {text}\n")
    return "".join(parts)


def _quoted(text: str) -> str:
    """Write a TOML string; its characters are printable."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# ---------------------------------------------------------------- what a command line uses

_chosen = [""]
"""The context that the command line names."""


def choose(name: str) -> None:
    """Note which context a command line names; empty: none."""
    _chosen[0] = name


def chosen_name() -> str:
    """Name of the context in use; empty: none. Raises FailedPrecondition, InvalidArgument."""
    name = _chosen[0] or os.environ.get(VARIABLE, "")
    if not name:
        name = ContextFile.read().current
    return "" if name == NO_CONTEXT else name


def values() -> dict[str, Value]:
    """Return the values of this command line but for its options. Raises NotFound for a context that is not there,
    FailedPrecondition, InvalidArgument."""
    name = chosen_name()
    kept = _fields(ContextFile.read().get(name) if name else BrokerContext())
    told = {field: os.environ.get(f"DANUBE_{field.upper()}", "") for field in FIELDS}
    if CLIENT_MARK not in told["sign_on"]:
        told["sign_on"] = ""  # HOST:PORT is a setting of a broker
    if any(told[field] for field in WAY_IN):
        # the certificate is that of the context's sign-on
        kept |= dict.fromkeys((*WAY_IN, "tls"), "")
    found = {}
    for field in FIELDS:
        source = "environment" if told[field] else "context" if kept[field] else "default"
        found[field] = Value(told[field] or kept[field], source)
    return found


def values_of(name: str) -> dict[str, Value]:
    """Return the values of a context, in which neither the environment nor the context in use has a say. Raises as
    `values`."""
    return fields_of(ContextFile.read().get(name))


def fields_of(context: BrokerContext) -> dict[str, Value]:
    """Return the values of a context alone."""
    kept = _fields(context)
    return {field: Value(text, "context" if text else "default") for field, text in kept.items()}


def _fields(context: BrokerContext) -> dict[str, str]:
    kept = {field: getattr(context, field) for field in FIELDS}
    return kept | {"server_key": " ".join(context.server_key)}


def value_of(field: str) -> str:
    """Return one of `values`; empty: it is not set."""
    return values()[field].text


def complete_contexts(incomplete: str) -> list[str]:
    """Names of contexts that begin so, for a shell."""
    try:
        return [name for name in ContextFile.read().names if name.startswith(incomplete)]
    except DanubeError:
        return []
