"""The thread of the coordinator that serves the admin port.

The listening socket was made by the supervisor and is inherited, so requests wait instead of being
refused while the coordinator starts, or starts again. The thread imports what it needs by itself,
after the broker is ready: that takes half a second, which no client should wait for. With a certificate it
speaks TLS only, and looks once a second whether the certificate's files have changed.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from danube_fast.admin.view import BrokerView, Exposure
from danube_fast.clock import Clock
from danube_fast.config import Settings, join_address
from danube_fast.errors import DanubeError
from danube_fast.workers.coordinator.request_access import RequestAccess
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.denials import Denials

if TYPE_CHECKING:  # Starlette takes a while, and no client should wait for it
    from danube_fast.security.tls import ServerTls

__all__ = ["BrokerView", "WebThread", "address_of"]

_log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE_MAX = 16
RETRY_SECONDS = 1.0
STOP_WAIT_SECONDS = 1.0
"""The thread dies with the process; only requests under way are waited for."""


def address_of(listen_fd: int) -> str:
    """Return HOST:PORT of a listening socket; -1 is none, and has no address."""
    if listen_fd < 0:
        return ""
    with socket.socket(fileno=os.dup(listen_fd)) as copy:
        return join_address(*copy.getsockname()[:2])


class WebThread:
    """Serve HTTP on an inherited listening socket until `stop`."""

    def __init__(
        self, view: BrokerView, listen_fd: int, clock: Clock, settings: Settings, access: Access | None,
        denials: Denials | None = None,
    ) -> None:  # fmt: skip
        """`access`: who may ask for what; None: all may ask for everything."""
        self._view, self._socket = view, socket.socket(fileno=listen_fd)
        self._clock, self._settings = clock, settings
        self._guard = RequestAccess(access, clock, denials) if access is not None else None
        self._tls: ServerTls | None = None
        self._tls_wait = ""
        """Why the port has no TLS yet; empty: it has, or needs none."""
        view.exposure = self._exposure
        self._server: Any = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="admin-http", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end and give it a moment."""
        self._stopped.set()
        if self._server is not None:
            self._server.end()
            self._thread.join(STOP_WAIT_SECONDS)

    @property
    def tls_fault(self) -> str:
        """Why the newest TLS files are not in use, or refuse clients; empty: all is well, or there are none."""
        tls = self._tls
        if tls is None:
            return self._tls_wait
        crl, faults = self._settings.tls_client_crl, [tls.fault]
        if 0 < tls.crl_expires_ns <= self._clock.wall_ns() and not tls.fault:
            faults.append(
                f"a list of revoked certificates in {crl} has expired, and clients of its CA are refused: give its newest list"
            )
        if tls.unlisted:
            faults.append(
                f"{tls.unlisted} of {self._settings.tls_client_ca} have no list of revoked certificates in {crl}, and all "
                "their clients are refused: add the list of each CA, or take the CA out"
            )
        return "; ".join(filter(None, faults))

    def _exposure(self) -> Exposure:
        """Describe who gets in, for metrics."""
        is_required, tls = self._settings.auth != "none", self._tls
        if tls is None:
            return Exposure(is_required)
        return Exposure(
            is_required, tls.expires_ns, bool(tls.fault), tls.reloads, tls.crl_expires_ns
        )

    def _load_tls(self) -> None:
        """Read the certificate, when there is one to be read; wait for one that can be used."""
        if not self._settings.tls_certificate:
            return
        from danube_fast.security.tls import ServerTls

        while self._tls is None and not self._stopped.is_set():
            try:
                self._tls = ServerTls.of(self._settings)
            except DanubeError as error:  # the broker goes on without its admin port meanwhile
                said, self._tls_wait = self._tls_wait, f"the admin port waits: {error}"
                if self._tls_wait != said:
                    _log.error("%s", self._tls_wait)
                self._stopped.wait(RETRY_SECONDS)

    def _run(self) -> None:
        self._load_tls()
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
        import uvicorn

        from danube_fast.admin.http_api import create_app
        from danube_fast.admin.http_connections import limited_protocol
        from danube_fast.admin.http_server import HttpServer

        tls, clock = self._tls, self._clock

        config = uvicorn.Config(
            create_app(self._view, self._guard),
            http=limited_protocol(tls),
            ws="none",
            backlog=ACCEPTED_AT_ONCE_MAX,
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # any program of this host could say whence it comes
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        look = None if tls is None else lambda: tls.refresh(clock.monotonic_ns())
        self._server = HttpServer(config, look)
        if not self._stopped.is_set():
            self._server.run(sockets=[self._socket])
