"""The HTTP server of a port: uvicorn's, which an idle broker does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

import uvicorn

__all__ = ["HttpServer"]

_log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""uvicorn itself looks at the clock ten times a second."""


class HttpServer(uvicorn.Server):
    """Serves until `end`, and looks at the clock once a second. Signals are for the process."""

    def __init__(self, config: uvicorn.Config, on_look: Callable[[], object] | None = None) -> None:
        """`on_look` is called each time, in a thread beside the event loop: it may wait for a file system."""
        super().__init__(config)
        self._on_look = on_look
        self._wake: Callable[[], object] = lambda: None

    def end(self) -> None:
        """End soon; any thread may call it."""
        self.should_exit = True
        self._wake()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def main_loop(self) -> None:
        """Wait for the end."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(ended.set)
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), LOOK_SECONDS)
            if self._on_look is not None:
                await loop.run_in_executor(None, self._look, self._on_look)

    @staticmethod
    def _look(on_look: Callable[[], object]) -> None:
        try:
            on_look()
        except Exception:  # the next look may do better, and the port serves on
            _log.exception("a look at the files of the HTTP port failed; it is tried again")
