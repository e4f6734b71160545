"""Keys of an issuer, kept: fetched again now and then, and when a token names one that is not there.

start, every refresh --load--> keys        a failure leaves the old ones, for `stale_seconds`
unknown kid ----------'                    at most once in RELOAD_NS, however many ask; they wait for it together
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import DanubeError, Unavailable
from danube_fast.security.issuers import Issuer
from danube_fast.security.jwks import KeySet, load_keys
from danube_fast.security.tokens import OpenToken

__all__ = ["KeyCache"]

_log = logging.getLogger(__name__)

RELOAD_NS = 10 * SECOND_NS
"""Tokens with invented kids cause no more fetches than that."""
FILE_SECONDS = 5
"""How often a file is read."""
WAIT_SECONDS = 5.0
"""A request waits so long for a fetch."""
RETRY_SECONDS_MAX = 60.0


class KeyCache:
    """Keep the keys of one issuer. Used by the event loop; loads are made by threads."""

    def __init__(
        self, issuer: Issuer, clock: Clock, load: Callable[[Issuer], KeySet] = load_keys
    ) -> None:
        self.issuer, self._clock, self._load = issuer, clock, load
        self._keys = KeySet()
        self._loaded_ns: int | None = None
        """When the keys came, monotonic."""
        self._tried_ns: int | None = None
        self._loading: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self.fault = ""
        """Why the last load failed; empty: it did not."""

    async def find(self, token: OpenToken) -> Any:
        """Return the key of a token; None: the issuer has none like that. Raises Unavailable."""
        key = self._find(token)
        if key is None:
            await self._look_again()
            key = self._find(token)
        if key is None and self._is_stale:
            raise Unavailable(
                f"the keys of issuer {self.issuer.name} cannot be had just now; try again"
            )
        return key

    def start(self) -> None:
        """Keep the keys fresh from now on."""
        self._fetching = asyncio.get_running_loop().create_task(self.keep_fresh())

    def close(self) -> None:
        """Load no keys any more."""
        if self._fetching is not None:
            self._fetching.cancel()

    async def keep_fresh(self) -> None:
        """Load the keys again and again, until cancelled."""
        is_remote = bool(self.issuer.jwks_url)
        period = float(self.issuer.refresh_seconds if is_remote else FILE_SECONDS)
        pause = retry = 1.0
        while True:
            await self._load_once()
            pause, retry = (retry, 2 * retry) if self.fault else (period, 1.0)
            await asyncio.sleep(min(pause, period, RETRY_SECONDS_MAX if self.fault else period))

    @property
    def _is_stale(self) -> bool:
        """Whether the keys have not been confirmed for too long."""
        if self._loaded_ns is None:
            return True
        age_ns = self._clock.monotonic_ns() - self._loaded_ns
        return age_ns > self.issuer.stale_seconds * SECOND_NS

    def _find(self, token: OpenToken) -> Any:
        return None if self._is_stale else self._keys.find(token.algorithm, token.kid)

    async def _look_again(self) -> None:
        """Load the keys if that was not tried just now; wait for a load that is under way."""
        now_ns = self._clock.monotonic_ns()
        is_due = self._tried_ns is None or now_ns - self._tried_ns >= RELOAD_NS
        if self._loading is not None or is_due:
            try:
                await asyncio.wait_for(self._load_once(), WAIT_SECONDS)
            except TimeoutError:
                return

    async def _load_once(self) -> None:
        """Load the keys, or wait for the load that is under way."""
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._run_load())
        await asyncio.shield(self._loading)

    async def _run_load(self) -> None:
        self._tried_ns = self._clock.monotonic_ns()
        try:
            self._keys = await asyncio.to_thread(self._load, self.issuer)
            self._loaded_ns, self.fault = self._clock.monotonic_ns(), ""
        except DanubeError as error:
            self._note(str(error))
        except Exception as error:  # one issuer must not end sign-on for all
            self._note(repr(error))
        finally:
            self._loading = None

    def _note(self, fault: str) -> None:
        if fault != self.fault:
            self.fault = fault
            named = f"keys of issuer {self.issuer.name}"
            _log.warning("%s", fault if named in fault else f"{named}: {fault}")
