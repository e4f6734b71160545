"""The HTTP server of a port: uvicorn's, which an idle broker does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import uvicorn

__all__ = ["HttpServer"]

_log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""uvicorn itself looks at the clock ten times a second."""


class HttpServer(uvicorn.Server):
    """Serves until `end`, and looks at the clock once a second. Signals are for the process."""

    def __init__(self, config: uvicorn.Config, on_look: Callable[[], object] | None = None) -> None:
        """`on_look` is called each time, in a thread of its own: one that waits for a file system holds nothing up, the end
        of the process neither, and is left alone until it is back."""
        super().__init__(config)
        self._on_look = on_look
        self._looking: threading.Thread | None = None
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
                self._begin_look(self._on_look)

    def _begin_look(self, on_look: Callable[[], object]) -> None:
        if self._looking is not None and self._looking.is_alive():
            return
        looking = threading.Thread(target=self._look, args=(on_look,), name="look", daemon=True)
        try:
            looking.start()
        except RuntimeError as error:
            _log.warning("no look at the files of the HTTP port (%s); it is tried again", error)
        else:
            self._looking = looking

    @staticmethod
    def _look(on_look: Callable[[], object]) -> None:
        try:
            on_look()
        except Exception:  # the next look may do better, and the port serves on
            _log.exception("a look at the files of the HTTP port failed; it is tried again")
