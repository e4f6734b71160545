"""The thread of the coordinator that serves the admin port.

The listening socket was made by the supervisor and is inherited, so requests wait instead of being
refused while the coordinator starts, or starts again. The thread imports what it needs by itself,
after the broker is ready: that takes half a second, which no client should wait for.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from danube_fast.admin.view import BrokerView

__all__ = ["BrokerView", "WebThread"]

_log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
REQUEST_SECONDS = 10.0
"""A request must be sent, and its answer read, in this time."""
CONNECTIONS_MAX = 32
"""Then the one that has waited longest is closed for a new one."""
ACCEPTED_AT_ONCE_MAX = 16
RETRY_SECONDS = 1.0
STOP_WAIT_SECONDS = 1.0
"""The thread dies with the process; only requests under way are waited for."""


def impatient_protocol() -> type[Any]:
    """Protocol of uvicorn for connections that are closed if their request, or the reading of the
    answer, takes too long; or when they are the oldest and there are too many."""
    import asyncio

    from uvicorn.protocols.http.h11_impl import H11Protocol

    waiting: dict[Any, asyncio.TimerHandle] = {}
    """Connections, the one that has waited longest first."""

    class Impatient(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()
            if len(waiting) > CONNECTIONS_MAX:
                next(iter(waiting)).give_up()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait_no_more()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing():
                self._wait()

        def give_up(self) -> None:
            """Close the connection at once."""
            self._wait_no_more()
            self.transport.abort()

        def _wait(self) -> None:
            self._wait_no_more()
            waiting[self] = self.loop.call_later(REQUEST_SECONDS, self.give_up)

        def _wait_no_more(self) -> None:
            timer = waiting.pop(self, None)
            if timer is not None:
                timer.cancel()

    return Impatient


class WebThread:
    """Serve HTTP on an inherited listening socket until `stop`."""

    def __init__(self, view: BrokerView, listen_fd: int) -> None:
        self._view, self._socket = view, socket.socket(fileno=listen_fd)
        self._server: Any = None
        self._wake: Callable[[], object] = lambda: None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="admin-http", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end and give it a moment."""
        self._stopped.set()
        if self._server is not None:
            self._server.should_exit = True
            self._wake()
            self._thread.join(STOP_WAIT_SECONDS)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._serve()
                return
            except Exception as error:  # the broker goes on without its admin port
                if not self._is_short_of_descriptors(error):
                    _log.exception(
                        "the admin port stopped; restart the coordinator to have it back"
                    )
                    return
                _log.warning("the admin port waits: %s; raise `ulimit -n`", error)
                self._stopped.wait(RETRY_SECONDS)

    def _is_short_of_descriptors(self, error: Exception) -> bool:
        """Whether the server has not begun, for lack of descriptors, which others may give back."""
        has_begun = self._server is not None and self._server.started
        is_short = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
        return is_short and not has_begun

    def _serve(self) -> None:
        import asyncio

        import uvicorn

        from danube_fast.admin.http_api import create_app

        class Server(uvicorn.Server):
            """Look at the clock once a second, not ten times: an idle broker should cost nothing."""

            async def main_loop(server) -> None:  # noqa: N805
                ended = asyncio.Event()
                loop = asyncio.get_running_loop()
                self._wake = lambda: loop.call_soon_threadsafe(ended.set)
                while not await server.on_tick(0):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(ended.wait(), TICK_SECONDS)

        config = uvicorn.Config(
            create_app(self._view),
            http=impatient_protocol(),
            backlog=ACCEPTED_AT_ONCE_MAX,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = Server(config)
        if not self._stopped.is_set():
            self._server.run(sockets=[self._socket])
