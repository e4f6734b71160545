"""Tokens (JWT) that trusted issuers vouch with: a signature by a key of theirs, and claims that fit.

    header.payload.signature --open--> issuer, algorithm, kid --verify(key)--> principal, groups, end

What the token says picks among keys that the file of issuers allows, never more. Only what the signature covers counts.
Texts of errors are for the broker's log; a client hears the same for all of them.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from danube_fast.clock import SECOND_NS
from danube_fast.errors import FailedPrecondition, PermissionDenied
from danube_fast.security.issuers import ALGORITHMS, Issuer
from danube_fast.security.jwks import KID_CHARACTERS_MAX
from danube_fast.security.records import BOOTSTRAP, GROUPS_MAX, JWT_SOURCE, is_name

if TYPE_CHECKING:
    from jwt.algorithms import Algorithm

__all__ = [
    "TOKEN_BYTES_MAX",
    "OpenToken",
    "TokenVerifier",
    "Verified",
    "groups_of",
    "user_of",
]

TOKEN_BYTES_MAX = 16 * 1024
_FORM = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\Z")
_SECONDS_END = 1 << 33
"""The year 2242: later times are mistakes."""
Wrong = Callable[[str], PermissionDenied]
"""Makes the refusal that says what is wrong."""


class OpenToken(NamedTuple):
    """A token whose signature is not verified yet: where to look for its key."""

    text: str
    issuer: Issuer
    algorithm: str
    kid: str | None
    claims: dict[str, Any]
    """Not to be believed before the signature is verified."""


class Verified(NamedTuple):
    """Claims that a token, an API key or an authenticator vouches for."""

    principal: str
    groups: list[str]
    expires_ns: int
    """Wall clock; the sign-on ends then."""
    source: str
    registered: bool = True
    """The principal must have a record."""
    entry: str = ""
    """Digest of the entry of the issuer that was trusted; empty: no issuer has vouched."""


class TokenVerifier:
    """Verify tokens of trusted issuers. Reads no file, no clock and no socket."""

    def __init__(self, issuers: list[Issuer]) -> None:
        """Raises FailedPrecondition without the library."""
        try:
            from jwt.algorithms import get_default_algorithms
        except ImportError:
            raise FailedPrecondition(
                "tokens need PyJWT: pip install 'danube-fast[security]', or leave the setting tokens empty"
            ) from None
        self._issuers = {each.issuer: each for each in issuers}
        found = get_default_algorithms()
        self._algorithms: dict[str, Algorithm] = {name: found[name] for name in ALGORITHMS}

    def open(self, text: str) -> OpenToken:
        """Find out who is said to have issued a token. Raises PermissionDenied."""
        header, claims = _parse(text)
        issuer = self._issuer_of(claims)
        if issuer is None:
            raise PermissionDenied("its issuer is not trusted")
        if "crit" in header or "b64" in header:
            raise PermissionDenied(f"issuer {issuer.name}: it has extensions that are not known")
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in issuer.algorithms:
            raise PermissionDenied(f"issuer {issuer.name}: its algorithm is not allowed")
        kid = header.get("kid")
        if kid is not None and (not isinstance(kid, str) or len(kid) > KID_CHARACTERS_MAX):
            raise PermissionDenied(f"issuer {issuer.name}: its kid is malformed")
        # a secret has no name
        return OpenToken(text, issuer, algorithm, "" if issuer.secret_file else kid, claims)

    def is_of_an_issuer(self, text: str) -> bool:
        """Whether a text is a token that says that a trusted issuer made it."""
        try:
            return self._issuer_of(_parse(text)[1]) is not None
        except PermissionDenied:
            return False

    def _issuer_of(self, claims: dict[str, Any]) -> Issuer | None:
        named = claims.get("iss")
        return self._issuers.get(named) if isinstance(named, str) else None

    def verify(self, token: OpenToken, key: Any, now_ns: int) -> Verified:
        """Return what a token vouches for at that wall time. Raises PermissionDenied that says what is wrong with it."""
        issuer = token.issuer

        def wrong(text: str) -> PermissionDenied:
            return PermissionDenied(f"issuer {issuer.name}: {text}")

        signed, _, signature = token.text.rpartition(".")
        try:
            content = _decode_base64(signature)
            is_good = self._algorithms[token.algorithm].verify(signed.encode(), key, content)
        except Exception:  # whatever a malformed token does inside the libraries, it is none
            is_good = False
        if is_good is not True:
            raise wrong("its signature is not good")
        claims = token.claims
        audience = claims.get("aud")
        named = audience if isinstance(audience, list) else [audience]
        if not any(each in issuer.audiences for each in named if isinstance(each, str)):
            raise wrong("it is for another audience")
        expires_ns = self._check_times(claims, issuer, now_ns, wrong)
        claim = issuer.principal_claim
        return Verified(
            user_of(claims.get(claim), issuer.prefix, f"claim {claim}", wrong),
            groups_of(claims.get(issuer.groups_claim), issuer.prefix, wrong),
            expires_ns,
            f"{JWT_SOURCE}{issuer.name}",
            not issuer.unregistered,
            issuer.digest,
        )

    def _check_times(
        self, claims: dict[str, Any], issuer: Issuer, now_ns: int, wrong: Wrong
    ) -> int:
        """Return when a sign-on ends that the token brings. Raises PermissionDenied."""
        leeway_ns = issuer.leeway_seconds * SECOND_NS
        if claims.get("exp") is None:
            raise wrong("it has no end (exp)")
        times = {}
        for name in ("exp", "nbf", "iat"):
            if name not in claims:
                continue
            value = claims[name]
            if type(value) not in (int, float) or not 0 <= value < _SECONDS_END:
                raise wrong(f"its claim {name} is no time")
            times[name] = int(value * SECOND_NS)
        if now_ns >= times["exp"] + leeway_ns:
            raise wrong("it has expired")
        if now_ns < times.get("nbf", 0) - leeway_ns:
            raise wrong("it is not valid yet (nbf)")
        if now_ns < times.get("iat", 0) - leeway_ns:
            raise wrong("it was issued in the future (iat)")
        return min(times["exp"] + leeway_ns, now_ns + issuer.lifetime_seconds_max * SECOND_NS)


def user_of(claim: Any, prefix: str, what: str, wrong: Wrong) -> str:
    """Return the name of the user that is claimed; `what` has claimed it. Raises PermissionDenied."""
    name = f"{prefix}{claim}" if isinstance(claim, str) else ""
    if not claim or not is_name(name):
        raise wrong(f"its {what} is not the name of a user")
    if name == BOOTSTRAP:
        raise wrong("it names a reserved user")
    return name


def groups_of(claim: Any, prefix: str, wrong: Wrong) -> list[str]:
    """Return the groups that are claimed; those are left out that no binding can name. Raises PermissionDenied."""
    if claim is None:
        return []
    if not isinstance(claim, list):
        raise wrong("its groups are no list")
    groups = [f"{prefix}{each}" for each in claim if isinstance(each, str)]
    groups = list(dict.fromkeys(each for each in groups if is_name(each)))
    if len(groups) > GROUPS_MAX:
        raise wrong(f"it claims more than {GROUPS_MAX} groups")
    return groups


def _parse(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read header and claims of a token. Raises PermissionDenied."""
    if len(text) > TOKEN_BYTES_MAX or not _FORM.match(text):
        raise PermissionDenied("malformed, or too long")
    head, payload, _ = text.split(".")
    return _decode(head), _decode(payload)


def _decode_base64(part: str) -> bytes:
    """Read base64 as tokens have it. Raises ValueError."""
    return urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _decode(part: str) -> dict[str, Any]:
    """Read a part of a token. Raises PermissionDenied."""
    try:
        found = msgspec.json.decode(_decode_base64(part))
    except (ValueError, RecursionError):  # a DecodeError is one
        found = None
    if not isinstance(found, dict):
        raise PermissionDenied("malformed: it is no JSON object")
    return found
