r"""The thread that says who may connect: ZeroMQ asks it once for each connection, before a message passes (ZAP 1.0).

    tcp, CURVE: 32 bytes of public key --> "curve:<Z85>" --\
                                                           admit(proof) --> 200 and the proof, or 400
    ipc, NULL: uid of the peer's process --> "uid:<uid>" --/

Each message of a connection then carries its proof as `User-Id`. Sockets without the domain are never asked about. All
others have it enforced, so without this thread no client comes in: it starts before any of them is bound.

The answer also names the connection, as ROUTER knows it: a zero byte, 40 random bits, a number. ROUTER would count names up
from a random 32 bits, and let a client ask for one that is free: who has found that of a client would, once it has lost its
connection, be sent what is for it. A name of the answer replaces the one that a client brought before, so it comes last.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import select
import struct
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils import z85

from danube_fast.errors import DanubeError, FailedPrecondition, Unavailable
from danube_fast.net.io_threads import IoThreads
from danube_fast.net.local_rate_limit import PER_SECOND, LocalRateLimit

__all__ = ["DOMAIN", "ENDPOINT", "NAME_BYTES", "ZapThread"]

_log = logging.getLogger(__name__)

DOMAIN = b"danube"
ENDPOINT = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks; fixed by ZAP."""
_VERSION = b"1.0"
_ADMITTED, _REFUSED = (b"200", b"OK"), (b"400", b"refused")
_UNKNOWN = b"500", b"ask again"
_NULL, _CURVE = b"NULL", b"CURVE"
_LOCAL = "uid:"
LOCAL_AT_ONCE = 40_000
"""Burst of connections of one local user, unless the owner says otherwise."""
_HEAD_PARTS = 6
"""Version, request id, domain, address, routing id, mechanism; the credentials follow."""
_PART_BYTES_MAX = 255
_KEY_BYTES = 32
_NUMBER = rb"(?:0|[1-9][0-9]{0,9})"
_IPC_ADDRESS = re.compile(rb"localhost:(%s):%s:%s" % (_NUMBER, _NUMBER, _NUMBER))
"""What libzmq 4.3 says of a peer on ipc, path or abstract: "localhost:<uid>:<gid>:<pid>", as SO_PEERCRED has them.
Peers on tcp are numbers, "127.0.0.1" or "::1", without a port, and never begin so."""
_UID_MAX = (1 << 32) - 2
"""The number above is not a user."""
_REQUESTS_AT_ONCE = 64
"""Answered before it is looked whether the thread is to end."""
_RANDOM_BYTES = 5
_NUMBER_BYTES = 2
"""Names end with consecutive numbers, as tables are addressed by them."""
NAME_BYTES = 1 + _RANDOM_BYTES + _NUMBER_BYTES
"""Of the name of a connection that was admitted."""
_PROPERTY = struct.Struct(f">B8sI1s{_RANDOM_BYTES}sH")
"""How metadata of ZMTP 3.1 writes the property `Identity`."""
_START_SECONDS = 10.0
_STOP_SECONDS = 10.0
_LOG_SECONDS = 60.0


class ZapThread:
    """Answers ZeroMQ for all sockets of one context. `start` and `stop` are called by its owner's thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], admit: Callable[[str], bool],
        refused: Callable[[str, str], None] = lambda proof, address: None, local_at_once: int = LOCAL_AT_ONCE,
    ) -> None:  # fmt: skip
        """`admit`: whether who has proved that may connect; called in the thread. If it raises, the answer is no.
        `refused` is told of each refusal, in the thread too: proof and address. `local_at_once`: how often a local user comes
        in before it has to wait."""
        self._context, self._admit, self._refused = context, admit, refused
        self._bound = threading.Event()
        self._fault: zmq.ZMQError | None = None
        self._stop_fd = -1
        self._rate_limit = LocalRateLimit(local_at_once)
        self._logged = self._rate_logged = -_LOG_SECONDS
        self._numbers = itertools.cycle(range(1 << 8 * _NUMBER_BYTES))
        self._thread = threading.Thread(target=self._run, name="zap", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it answers. If it does not, no client is admitted any more."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to answer, once; afterwards sockets may be bound. Raises FailedPrecondition, Unavailable."""
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()
        is_bound = self._bound.wait(_START_SECONDS)
        if self._fault is not None:
            self.stop()
            raise FailedPrecondition(
                f"cannot answer ZeroMQ's questions of who may connect: {self._fault}; use one ZapThread in a context"
            ) from self._fault
        if not is_bound:
            raise Unavailable(
                f"the ZAP thread was not ready in {_START_SECONDS:.0f} s; start again"
            )

    def stop(self) -> None:
        """Answer no more: no client is admitted from now on. Call it before the context is destroyed."""
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join(_STOP_SECONDS)
        if (
            self._thread.is_alive()
        ):  # in `admit`; its socket is closed with the context, which ends it
            _log.warning("the ZAP thread has not ended in %.0f s", _STOP_SECONDS)
            return
        os.close(self._stop_fd)
        self._stop_fd = -1

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            socket = self._context.socket(zmq.ROUTER)
        except zmq.ZMQError as error:
            self._fault = error
            self._bound.set()
            return
        threads = IoThreads()
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(ENDPOINT)
            self._bound.set()
            self._serve(socket, threads)
        except zmq.ZMQError as error:
            if self._bound.is_set():
                _log.warning("the ZAP thread ends, no client is admitted any more: %s", error)
            self._fault = error
        finally:
            # to close it alone frees the endpoint a moment later
            with contextlib.suppress(zmq.ZMQError):
                socket.unbind(ENDPOINT)
            socket.close(0)
            threads.close()
            self._bound.set()

    def _serve(self, socket: zmq.Socket[bytes], threads: IoThreads) -> None:
        """Answer requests until `stop`."""
        poller = select.poll()  # a fraction of what zmq.Poller costs
        poller.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
        poller.register(self._stop_fd, select.POLLIN)
        while True:
            # ZeroMQ's descriptor is raised once for several requests: all are answered before it is slept on
            answers: list[list[bytes]] = []
            with contextlib.suppress(zmq.Again):
                for _ in range(_REQUESTS_AT_ONCE):
                    asking, *request = socket.recv_multipart(zmq.NOBLOCK)
                    if request[:1] == [b""]:
                        answers.append([asking, b"", *self._answer(request[1:])])
            if answers:  # without a pause ZeroMQ would take a quarter of the names before those of the clients
                threads.await_all()
            for answer in answers:
                socket.send_multipart(answer)
            has_more = int(socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN)
            if self._stop_fd in dict(poller.poll(0 if has_more else None)):
                return

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Make the reply to a request, whatever it is."""
        number = request[1] if len(request) > 1 and len(request[1]) <= _PART_BYTES_MAX else b""
        proof = _proof_in(request)
        is_admitted = proof != "" and self._asks(proof)
        if is_admitted and proof.startswith(_LOCAL) and not self._is_within_rate(proof):
            is_admitted = None
        code, text = _ADMITTED if is_admitted else _UNKNOWN if is_admitted is None else _REFUSED
        if is_admitted is False and len(request) >= _HEAD_PARTS:
            self._refused(proof, request[3][:_PART_BYTES_MAX].decode(errors="replace"))
        if not is_admitted:
            return [_VERSION, number, code, text, b"", b""]
        return [_VERSION, number, code, text, proof.encode(), self._name()]

    def _is_within_rate(self, proof: str) -> bool:
        """Whether the rate limit of a local user allows one more connection."""
        if self._rate_limit.admits(proof, time.monotonic_ns()):
            return True
        now = time.monotonic()
        if now - self._rate_logged >= _LOG_SECONDS:
            self._rate_logged = now
            _log.warning(
                "%s comes in too often over ipc, and has to wait: %d a second", proof, PER_SECOND
            )
        return False

    def _name(self) -> bytes:
        """Choose the name of a connection."""
        unknown = secrets.token_bytes(_RANDOM_BYTES)
        return _PROPERTY.pack(8, b"Identity", NAME_BYTES, b"\0", unknown, next(self._numbers))

    def _asks(self, proof: str) -> bool | None:
        """Whether a client may connect; None: that cannot be told now, so it asks again."""
        try:
            return self._admit(proof) is True
        except DanubeError:
            return None
        except Exception:
            now = time.monotonic()
            if now - self._logged >= _LOG_SECONDS:
                self._logged = now
                _log.exception("a client was refused, as looking it up failed")
            return None


def _proof_in(request: list[bytes]) -> str:
    """Find what a request of ZAP proves; empty if it is malformed, or proves nothing."""
    if len(request) < _HEAD_PARTS or max(map(len, request)) > _PART_BYTES_MAX:
        return ""
    version, _, domain, address, _, mechanism, *credentials = request
    if version != _VERSION or domain != DOMAIN:
        return ""
    if mechanism == _CURVE and [len(part) for part in credentials] == [_KEY_BYTES]:
        return f"curve:{z85.encode(credentials[0]).decode()}"
    if mechanism == _NULL and not credentials:
        match = _IPC_ADDRESS.fullmatch(address)
        if match is not None and int(match[1]) <= _UID_MAX:
            return f"{_LOCAL}{int(match[1])}"
    return ""
