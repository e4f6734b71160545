"""Trusted issuers of tokens: the TOML file of the setting `tokens`. Light to import.

    [[issuer]]
    name = "corp"                               # in logs, and in lists of sign-ons
    issuer = "https://login.example.com/"       # claim `iss`, exactly
    audience = "danube"                         # claim `aud`: one of these
    algorithms = ["RS256", "ES256"]             # others are refused
    jwks_url = "https://login.example.com/jwks" # or jwks_file, or secret_file (0600; HS256 alone)

Paths are relative to the file. Who can write it lets anyone in, so no one but its owner may.
"""

from __future__ import annotations

import stat
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from danube_fast.checks import in_our_words
from danube_fast.errors import InvalidArgument
from danube_fast.security.private_files import PrivateFile, read_private
from danube_fast.security.records import is_name

__all__ = ["ALGORITHMS", "Issuer", "read_issuers"]

ALGORITHMS = ("HS256", "RS256", "ES256", "EdDSA")
ISSUERS_MAX = 64
_FILE = PrivateFile(
    noun="file of trusted issuers",
    remedy="docs/security.md shows such a file",
    others=stat.S_IWGRP | stat.S_IWOTH,
    mode_remedy="chmod go-w",
    bytes_max=256 * 1024,
)
_Text = Annotated[str, Meta(min_length=1, max_length=1024)]


class Issuer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An issuer that is trusted, and what its tokens must say."""

    name: str
    issuer: _Text
    audience: _Text | Annotated[list[_Text], Meta(min_length=1, max_length=64)]
    algorithms: Annotated[list[str], Meta(min_length=1, max_length=8)]
    jwks_url: str = ""
    jwks_ca: str = ""
    """PEM file of the authorities that vouch for the server of `jwks_url`; empty: those of the system."""
    jwks_file: str = ""
    secret_file: str = ""
    principal_claim: _Text = "sub"
    groups_claim: _Text = "groups"
    prefix: str = ""
    """Put in front of the names of principals and groups, so that issuers cannot speak for each other's."""
    unregistered: bool = False
    """Principals need no record here: their rights come from bindings of their groups and names."""
    leeway_seconds: Annotated[int, Meta(ge=0, le=300)] = 30
    """By how much the clocks of the issuer and of this host may differ."""
    lifetime_seconds_max: Annotated[int, Meta(ge=10, le=86_400)] = 3600
    """A sign-on ends after that time, though the token is good for longer."""
    refresh_seconds: Annotated[int, Meta(ge=10, le=86_400)] = 300
    """How often `jwks_url` is fetched."""
    stale_seconds: Annotated[int, Meta(ge=60, le=604_800)] = 3600
    """So long are keys good that cannot be fetched again."""

    @property
    def audiences(self) -> list[str]:
        """Values of the claim `aud` that are taken."""
        return [self.audience] if isinstance(self.audience, str) else self.audience

    @property
    def source(self) -> str:
        """Where its keys come from."""
        return self.secret_file or self.jwks_file or self.jwks_url

    @property
    def digest(self) -> str:
        """Tells this entry from others: it differs when any field does."""
        return sha256(msgspec.json.encode(self)).hexdigest()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    issuer: Annotated[list[Issuer], Meta(max_length=ISSUERS_MAX)]
    """`issuer = []` trusts no one; an empty file is a mistake."""


def read_issuers(path: Path) -> list[Issuer]:
    """Read the file. Raises FailedPrecondition if it is missing or others may write it, InvalidArgument that says what is
    wrong in it."""
    content = read_private(path, _FILE)
    try:
        found: dict[str, Any] = tomllib.loads(content.decode())
        issuers = msgspec.convert(found, _File).issuer
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is no text in UTF-8; {_FILE.remedy}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{path} is no TOML: {error}; {_FILE.remedy}") from None
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{in_our_words(error, str(path))}; {_FILE.remedy}") from None
    issuers = [_placed(each, path.parent) for each in issuers]
    for each in issuers:
        _check(each, path)
    for what, values in (
        ("name", [each.name for each in issuers]),
        ("issuer", [each.issuer for each in issuers]),
    ):
        if len(set(values)) != len(values):
            raise InvalidArgument(f"{path}: two issuers have the same {what}; give each its own")
    return issuers


def _placed(issuer: Issuer, folder: Path) -> Issuer:
    """Make the paths of an issuer absolute."""
    paths = {
        name: str(folder / getattr(issuer, name))
        for name in ("jwks_ca", "jwks_file", "secret_file")
        if getattr(issuer, name)
    }
    return msgspec.structs.replace(issuer, **paths)


def _check(issuer: Issuer, path: Path) -> None:
    def wrong(text: str) -> InvalidArgument:
        return InvalidArgument(f"{path}: issuer {issuer.name!a:.100}: {text}")

    if not is_name(issuer.name):
        raise wrong("its name is not 1 to 128 letters, digits, '_', '.', '@' or '-'")
    unknown = [each for each in issuer.algorithms if each not in ALGORITHMS]
    if unknown:
        raise wrong(f"{unknown[0]!a:.50} is no algorithm; choose from {', '.join(ALGORITHMS)}")
    sources = [issuer.jwks_url, issuer.jwks_file, issuer.secret_file]
    if sum(map(bool, sources)) != 1:
        raise wrong("give one of jwks_url, jwks_file and secret_file")
    if ("HS256" in issuer.algorithms) != bool(issuer.secret_file) or (
        issuer.secret_file and issuer.algorithms != ["HS256"]
    ):
        # with a public key as its secret, anyone could make tokens
        raise wrong("HS256 goes with secret_file, alone; the others with jwks_url or jwks_file")
    if issuer.prefix and not is_name(issuer.prefix):
        raise wrong("its prefix is not letters, digits, '_', '.', '@' or '-'")
    if issuer.jwks_url:
        _check_url(issuer.jwks_url, wrong)


def _check_url(url: str, wrong: Any) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise wrong("jwks_url is no URL") from None
    if parts.scheme != "https" or not parts.hostname:
        raise wrong("jwks_url is not https://HOST/...: keys that came unverified would be anyone's")
    if parts.username is not None or parts.fragment or not url.isascii() or not url.isprintable():
        raise wrong("jwks_url has a user or a fragment; leave them out")
