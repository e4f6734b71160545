"""Authenticators of other packages: sources of identity beside API keys and tokens, such as LDAP or a list of passwords.

An entry point of the group `danube_fast.authenticators` gives a callable; it takes the text behind the colon of the setting
`authenticator` (`NAME` or `NAME:TEXT`) and returns a `SecretAuthenticator`. A client's secret goes to it over HTTPS at a
sign-on, and what it answers counts for the CURVE key of that client:

    text --begins with dfk_--> API keys --no--> a token of a trusted issuer --no--> authenticator

Each text has one judge: the authenticator sees no API key, and no token that says that a trusted issuer made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from danube_fast.clock import SECOND_NS
from danube_fast.errors import Internal, InvalidArgument, PermissionDenied
from danube_fast.security.entry_points import EntryPointGroup
from danube_fast.security.records import AUTHENTICATOR_SOURCE, is_name
from danube_fast.security.tokens import Verified, groups_of, user_of

__all__ = [
    "AUTHENTICATORS",
    "Authenticated",
    "AuthenticatorRules",
    "SecretAuthenticator",
    "check_authenticator",
]

AUTHENTICATORS = EntryPointGroup(
    "danube_fast.authenticators", "authenticator", {"authenticate": "secret, address"}
)
LIFETIME_NS_MAX = 3600 * SECOND_NS
"""A sign-on is renewed within that time, so that the authenticator is asked again."""


class Authenticated(NamedTuple):
    """Answer of an authenticator: whose secret it is."""

    principal: str
    groups: Sequence[str] = ()
    """They count for this client, beside those of the user's record."""
    expires_ns: int = 0
    """Nanoseconds since 1970, when the sign-on ends; 0, or later than in an hour: in an hour."""


class SecretAuthenticator(Protocol):
    """Tells whose a secret is. Called in several threads at a time."""

    def authenticate(self, secret: str, address: str) -> Authenticated | None:
        """Return whose secret it is; None for one that is unknown. `address`: whence the client comes.

        Raises PermissionDenied with a reason for the audit log, Unavailable while it cannot tell: the client tries again.
        """
        ...


class AuthenticatorRules(NamedTuple):
    """Limits of what an authenticator may say, as an issuer of tokens has them."""

    name: str
    prefix: str = ""
    unregistered: bool = False

    def wrong(self, text: str) -> PermissionDenied:
        """Make the refusal that says what is wrong."""
        return PermissionDenied(f"authenticator {self.name}: {text}")

    def verified(self, found: object, now_ns: int) -> Verified:
        """Check an answer at that wall time. Raises PermissionDenied, Internal for what is no answer: a fault of the package
        ends no client."""
        if found is None:
            raise self.wrong("it knows no such secret")
        if not isinstance(found, Authenticated):
            raise Internal(f"it returned {type(found).__name__} instead of Authenticated or None")
        principal: Any = found.principal
        groups: Any = found.groups
        if not isinstance(principal, str):
            raise Internal(f"its principal is {type(principal).__name__} instead of str")
        if not isinstance(groups, list | tuple):
            raise Internal(f"its groups are {type(groups).__name__} instead of a list")
        return Verified(
            user_of(principal, self.prefix, "principal", self.wrong),
            groups_of(list(groups), self.prefix, self.wrong),
            self._end_of(found.expires_ns, now_ns),
            f"{AUTHENTICATOR_SOURCE}{self.name}",
            not self.unregistered,
        )

    def _end_of(self, expires_ns: object, now_ns: int) -> int:
        if type(expires_ns) is not int or expires_ns < 0:
            raise Internal("its expires_ns is no time: not an int from 0 on")
        if 0 < expires_ns <= now_ns:
            raise self.wrong("it has expired")
        return min(expires_ns or now_ns + LIFETIME_NS_MAX, now_ns + LIFETIME_NS_MAX)


def check_authenticator(value: str) -> None:
    """Check the setting before anything begins; loads no package. Raises InvalidArgument for a name that no package has."""
    AUTHENTICATORS.check(value)
    name = value.partition(":")[0]
    if not is_name(name):
        raise InvalidArgument(
            f"the authenticator {name!a:.200} has a name that no record can hold; its package must name it with letters, "
            "digits, '_', '.', '@' or '-'"
        )
