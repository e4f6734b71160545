"""How a command or a Spark job comes into a secured broker: texts and paths of files, none of which is a secret.

    options of a source, or environment and context --> Access, checked --> arguments of `connect()`

Files are read where the client is opened, by each process for itself, and a sign-on draws a key of its own there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from danube_fast.errors import InvalidArgument
from danube_fast.security.private_files import PrivateFile, read_private

__all__ = ["Access", "check_path", "check_user"]

_TOKEN_BYTES_MAX = 1 << 16
_UID_DIGITS_MAX = 10
_SECRET_MARKS = ("dfk_", "eyJ")
"""How API keys and JWTs begin."""


class Access(NamedTuple):
    """The way into a broker. Empty values are not set."""

    server_key: str = ""
    """Public keys of the broker, with blanks between."""
    key_file: str = ""
    sign_on: str = ""
    tls: str = ""
    token_file: str = ""
    server_uid: str = ""

    @classmethod
    def of(cls, found: Mapping[str, str], named: Callable[[str], str]) -> Access:
        """Take the values of these names. `named`: what the user calls one of them. Raises InvalidArgument for a way in
        that is not whole, or for two; it repeats no value that may be a secret."""
        access = cls(**{name: found.get(name, "") for name in cls._fields})
        access._check(named)
        return access

    def _check(self, named: Callable[[str], str]) -> None:
        for name in ("key_file", "token_file"):
            check_path(getattr(self, name), named(name))
        check_user(self.server_uid, named("server_uid"))
        other = "sign_on" if self.sign_on else "token_file"
        if self.key_file and (self.sign_on or self.token_file):
            raise InvalidArgument(
                f"{named('key_file')} and {named(other)} are two ways in; leave one of them out"
            )
        if bool(self.sign_on) != bool(self.token_file):
            missing = "token_file" if self.sign_on else "sign_on"
            raise InvalidArgument(
                f"{named(other)} needs {named(missing)}: a sign-on has its address, https://HOST:PORT, and its token "
                "from one place; give both there, or neither"
            )
        if self.key_file and not self.server_key:
            raise InvalidArgument(
                f"{named('key_file')} needs {named('server_key')}; give the public key that the broker shows"
            )
        if self.server_key and not (self.key_file or self.sign_on):
            raise InvalidArgument(
                f"{named('server_key')} needs a key of yours: give {named('key_file')}, or {named('sign_on')} and "
                f"{named('token_file')}"
            )

    def arguments(self) -> dict[str, Any]:
        """Return them as arguments of `connect()`. The token's file is read for each sign-on: what renews a token
        writes it there."""
        names = ("server_key", "key_file", *(("sign_on", "tls") if self.sign_on else ()))
        found: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name)}
        if self.sign_on:
            path = Path(self.token_file)
            found["token"] = lambda: _read_token(path)
        if self.server_uid:
            found["server_uid"] = int(self.server_uid)
        return found


def check_path(text: str, name: str) -> None:
    """Raise InvalidArgument for what is a secret, or the content of a file, in place of its path; it is not repeated."""
    if not text.isprintable() or Path(text).name.startswith(_SECRET_MARKS):
        raise InvalidArgument(
            f"{name} is the path of a file; write the key into one of mode 0600, and give its path"
        )


def check_user(text: str, name: str) -> None:
    """Raise InvalidArgument for what is no number of a user; empty: none is named."""
    if text and not (text.isascii() and text.isdecimal() and len(text) <= _UID_DIGITS_MAX):
        raise InvalidArgument(
            f"{name} is {text!a:.100}; give the number of the local user that the broker runs as"
        )


def _read_token(path: Path) -> str:
    """Read an API key or a token. Raises FailedPrecondition, InvalidArgument, which never quote it."""
    remedy = "name a file with an API key or a token"
    content = read_private(path, PrivateFile("token file", remedy, bytes_max=_TOKEN_BYTES_MAX))
    return content.decode(errors="replace").strip()
