"""Authentication: who is at the other end of a connection. HELLO carries claims, an Authenticator makes a principal of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["ANONYMOUS", "Authenticator", "Identity", "TrustClaims"]

ANONYMOUS = "anonymous"
PRINCIPAL_CHARACTERS_MAX = 256


class Identity(str):
    """The name of a principal that has proved itself, and the proof: a sign-on brings groups that others of the same
    principal do not have. For messages and logs take `str` of it."""

    __slots__ = ("proof",)

    proof: str

    def __new__(cls, principal: str, proof: str) -> Identity:
        """Name a principal that `proof` (`curve:KEY`, `uid:NUMBER`) stands for."""
        identity = super().__new__(cls, principal)
        identity.proof = proof
        return identity


class Authenticator(Protocol):
    """Names principals."""

    def authenticate(self, claims: Mapping[str, Any], proof: str = "") -> str:
        """Return the principal that a connection has.

        `claims`: `auth` of its HELLO. `proof`: what its transport has proved, `curve:` and the client's public key or `uid:`
        and the number of the local user; empty: nothing. Raises PermissionDenied that says what is missing or wrong, never what was expected.
        """
        ...


class TrustClaims:
    """Takes the claimed principal without proof; `anonymous` without a claim."""

    def authenticate(self, claims: Mapping[str, Any], proof: str = "") -> str:
        """Return the claim `principal`."""
        claimed = claims.get("principal")
        return claimed[:PRINCIPAL_CHARACTERS_MAX] if isinstance(claimed, str) else ANONYMOUS
