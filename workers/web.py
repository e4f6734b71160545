"""The thread of the coordinator that serves the admin port.

The listening socket was made by the supervisor and is inherited, so requests wait instead of being
refused while the coordinator starts, or starts again. The thread imports what it needs by itself,
after the broker is ready: that takes half a second, which nobody should wait for.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

from danube_fast.admin.view import BrokerView

__all__ = ["BrokerView", "WebThread"]

_log = logging.getLogger(__name__)

STOP_WAIT_SECONDS = 1.0


class WebThread:
    """Serves HTTP on an inherited listening socket until `stop`."""

    def __init__(self, view: BrokerView, listen_fd: int) -> None:
        self._view = view
        self._listen_fd = listen_fd
        self._server: Any = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="admin-http", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end and give it a moment."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(STOP_WAIT_SECONDS)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # the broker goes on without its admin port
            _log.exception("the admin port stopped; restart the coordinator to have it back")

    def _serve(self) -> None:
        import uvicorn

        from danube_fast.admin.http_api import create_app

        config = uvicorn.Config(
            create_app(self._view),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        if not self._stopped:
            self._server.run(sockets=[socket.socket(fileno=self._listen_fd)])
