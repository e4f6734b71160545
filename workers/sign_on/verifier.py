"""Verification of a bearer's text: an API key by the records, a token by the keys of its issuer, all else by the
authenticator of another package, if there is one.

All that is wrong with it is one refusal for the client; the audit log has the reason.
"""

from __future__ import annotations

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import PermissionDenied, Unavailable
from danube_fast.security import api_keys
from danube_fast.security.issuers import Issuer
from danube_fast.security.policy import Policy
from danube_fast.security.records import API_KEY_SOURCE
from danube_fast.security.tokens import TokenVerifier, Verified
from danube_fast.workers.sign_on.authenticator import AskedAuthenticator
from danube_fast.workers.sign_on.key_cache import KeyCache

__all__ = ["Verifier"]

API_KEY_LIFETIME_NS = 3600 * SECOND_NS
"""A sign-on with an API key is renewed within that time."""


class Verifier:
    """Verify API keys, tokens and other secrets. Used by the event loop only."""

    def __init__(
        self, policy: Policy, issuers: list[Issuer] | None, clock: Clock, authenticator: AskedAuthenticator | None
    ) -> None:  # fmt: skip
        """Raises FailedPrecondition if there are issuers, and the library for tokens is missing."""
        self._policy, self._clock, self._authenticator = policy, clock, authenticator
        self.caches: dict[str, KeyCache] = {}
        """Keys of trusted issuers, by their names."""
        self.trust(issuers)

    def trust(self, issuers: list[Issuer] | None) -> None:
        """Trust these issuers and no others; None: they are not known yet. Keys are kept of those that are the same as before.
        Raises FailedPrecondition as above."""
        self._is_waiting, issuers = issuers is None, issuers or []
        self._tokens = TokenVerifier(issuers) if issuers else None
        before, self.caches = self.caches, {}
        for issuer in issuers:
            known = before.get(issuer.name)
            if known is None or known.issuer != issuer:
                known = KeyCache(issuer, self._clock)
            self.caches[issuer.name] = known

    async def verify(self, text: str, address: str) -> Verified:
        """Return what a text vouches for; `address`: whence it comes. Raises PermissionDenied with the reason, Unavailable."""
        if api_keys.is_api_key(text):
            return self._verify_api_key(text)
        if self._is_waiting:  # it may be a token, which no authenticator is to see
            raise Unavailable(
                "the broker cannot read just now which issuers it trusts; API keys are good meanwhile"
            )
        tokens = self._tokens
        is_of_an_issuer = tokens is not None and tokens.is_of_an_issuer(text)
        if self._authenticator is not None and not is_of_an_issuer:
            return await self._authenticator.verify(text, address)
        if tokens is None:
            raise PermissionDenied("no issuer of tokens is trusted here")
        token = tokens.open(text)
        key = await self.caches[token.issuer.name].find(token)
        if key is None:
            raise PermissionDenied(f"issuer {token.issuer.name}: it has no such key")
        return tokens.verify(token, key, self._clock.wall_ns())

    def _verify_api_key(self, text: str) -> Verified:
        now_ns = self._clock.wall_ns()
        found = api_keys.find(self._policy, text, now_ns)
        if found is None:
            raise PermissionDenied("an API key that is unknown, wrong or expired")
        expires_ns = now_ns + API_KEY_LIFETIME_NS
        if found.expires_ns:
            expires_ns = min(expires_ns, found.expires_ns)
        return Verified(found.principal, [], expires_ns, f"{API_KEY_SOURCE}{found.id}")
