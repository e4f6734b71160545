"""The process where clients sign on: API keys and tokens once, over HTTPS, for a CURVE key until it expires.

    client --HTTPS: secret, public key--> verify (here alone) --AddSignOns--> coordinator --> all copies
           <--principal, end, server keys-----------------------answer-------'

One event loop in one thread: HTTP, the mailbox, timers. Keys of issuers are fetched by threads beside it. Clients that
are in need nothing of it; while it is down no client signs on, and the supervisor starts it again. A start of the broker
waits for it, so that one with files or an authenticator that cannot be used is refused. A process that starts again goes on
without files that cannot be used, and takes them as soon as they can be.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import uvicorn

from danube_fast.admin.http_connections import limited_protocol
from danube_fast.admin.http_server import HttpServer
from danube_fast.broker import messages as m
from danube_fast.clock import SECOND_NS
from danube_fast.errors import DanubeError, PermissionDenied, Unavailable, error_from_code
from danube_fast.net.sign_on import Grant
from danube_fast.ring.control import ProcessState
from danube_fast.ring.counters import Counter
from danube_fast.roles import COORDINATOR
from danube_fast.security.records import SignOn
from danube_fast.security.server_keys import server_keys
from danube_fast.security.tls import ServerTls
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.boot import Boot, boot
from danube_fast.workers.process.denials import Denial, Denials, is_audited
from danube_fast.workers.process.mailbox import Reply
from danube_fast.workers.process.security_copy import SecurityCopy
from danube_fast.workers.reports.denials import DenialReports
from danube_fast.workers.sign_on.authenticator import load_authenticator
from danube_fast.workers.sign_on.http_app import NotProved, create_app
from danube_fast.workers.sign_on.issuer_watch import IssuerWatch, issuer_files
from danube_fast.workers.sign_on.verifier import Verifier

__all__ = ["SignOnProcess", "main"]

_log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""Heartbeats, timeouts of calls."""
CONNECTIONS_MAX = 512
HANDSHAKES_MAX = 256
HEAD_BYTES_MAX = 24 * 1024
"""Of a request: a token and what else clients send."""
BATCH_MAX = 256
"""Sign-ons that the coordinator is asked for at once."""
ADD_TIMEOUT_MS = 3000
SERVER_KEY_NS = SECOND_NS
"""How often the broker's public keys are read."""
Waiting = tuple[bytes, str, "asyncio.Future[None] | None"]


class SignOnProcess:
    """Sign-on without its process."""

    def __init__(self, booted: Boot) -> None:
        """Raises FailedPrecondition, InvalidArgument for an authenticator that cannot be used, at the first start for files,
        too."""
        settings, is_again = booted.settings, booted.config.epoch > 1
        self._boot = booted
        self._access = Access(booted.clock)
        self._copy = SecurityCopy(booted, self._access)
        files = issuer_files(settings, may_wait=is_again)
        authenticator = self._authenticator = load_authenticator(settings, booted.clock)
        self._verifier = Verifier(self._access.policy, files.loaded, booted.clock, authenticator)
        # certificates of clients prove no one here, so CAs and lists of revoked ones are none of its business
        self._tls = ServerTls(
            Path(settings.tls_certificate), Path(settings.tls_key), may_wait=is_again
        )
        self._issuers = IssuerWatch(files, self._verifier, booted.mailbox, self._port_fault)
        self._waiting: list[Waiting] = []
        """Records that the next message to the coordinator takes, and the entries that have vouched for them."""
        self._is_sending = False
        self._server_keys: list[str] = []
        self._keys_ns: int | None = None
        self._turns: asyncio.TimerHandle | None = None
        self._denials = Denials(booted.clock, is_on=is_audited(settings))
        self._reports = DenialReports(booted.mailbox, self._denials)
        self._untold: int | None = None
        """Of those records, how many the coordinator has known before it has started again; None: it has been told so."""
        self._loads = 0
        """How often the copy had been read whole when the coordinator was told of sign-ons last."""

    # ------------------------------------------------------------ life

    def run(self) -> None:
        """Serve until a stop is requested."""
        self._copy.load_and_wait()
        if not self._boot.stop_requested:
            self._read_server_keys()
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._boot.mailbox.fileno(), self._turn)
        self._issuers.start()
        config = uvicorn.Config(
            create_app(self),
            http=limited_protocol(self._tls, CONNECTIONS_MAX, HANDSHAKES_MAX),
            ws="none",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,  # clients do not say whence they come
            server_header=False,
            lifespan="off",
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            timeout_graceful_shutdown=1,
        )
        tls, clock = self._tls, self._boot.clock
        self._server = HttpServer(config, lambda: tls.refresh(clock.monotonic_ns()))
        listener = socket.socket(fileno=self._boot.config.sign_on_fd)
        self._turn()
        self._boot.set_state(ProcessState.READY, listener.getsockname()[1])
        await self._server.serve([listener])
        self._issuers.close()
        self._loop.remove_reader(self._boot.mailbox.fileno())

    def _turn(self) -> None:
        """Do the work of other processes' messages, and look at the time."""
        if self._turns is not None:
            self._turns.cancel()
        booted = self._boot
        now_ns = booted.clock.monotonic_ns()
        booted.heartbeat()
        booted.mailbox.do_work(now_ns)
        self._copy.do_work(now_ns)
        self._issuers.do_work(now_ns)
        self._reports.do_work(now_ns)
        if (authenticator := self._authenticator) is not None:
            authenticator.do_work()
            booted.counters.set(Counter.THREADS_LOST, authenticator.threads_lost)
        if self._loads != self._access.loads:
            self._tell_again()
        if booted.stop_requested:
            self._server.end()
        if booted.mailbox.prepare_sleep():
            self._turns = self._loop.call_later(TICK_SECONDS, self._turn)
        else:
            self._turns = self._loop.call_later(0, self._turn)

    def _port_fault(self) -> str:
        """Say why the port closes all connections; empty: it does not."""
        return "" if self._tls.fingerprint else f"its port waits for a TLS pair: {self._tls.fault}"

    # ------------------------------------------------------------ sign-on

    async def sign_on(self, text: str, public_key: str, address: str) -> Grant:
        """Let a key in for what a text vouches for; `address`: whence it comes. Raises NotProved, DanubeError."""
        access, clock = self._access, self._boot.clock
        if not access.is_fresh:
            raise Unavailable("sign-on has not heard for a while who may come in; try again")
        # before the look at what vouches for it, which may be taken back meanwhile
        made_ns = clock.wall_ns()
        try:
            found = await self._verifier.verify(text, address)
        except PermissionDenied as reason:
            why = str(reason)
            self._denials.note(Denial("sign_on", address=address, resource=why, reason=why))
            raise NotProved from None
        record = SignOn(
            public_key, found.principal, found.groups, found.expires_ns, found.source, found.registered, made_ns
        )  # fmt: skip
        try:
            await self._add(record, found.entry)
        except PermissionDenied:
            self._denials.note(
                Denial("sign_on", found.principal, address=address, resource=found.source)
            )
            raise
        left_ns = max(found.expires_ns - clock.wall_ns(), 0)
        self._read_server_keys()
        return Grant(found.principal, left_ns // SECOND_NS, self._server_keys)

    async def _add(self, record: SignOn, entry: str) -> None:
        """Bring a sign-on into force, together with others of this moment. Raises DanubeError."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((msgspec.json.encode(record), entry, done))
        self._send_soon()
        await done

    def _send_soon(self) -> None:
        if self._waiting and not self._is_sending:
            self._is_sending = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        some, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
        message = m.AddSignOns([data for data, _, _ in some], [entry for _, entry, _ in some])

        def answered(reply: Reply) -> None:
            added: m.SignOnsAdded = reply.value
            for place, (_, _, done) in enumerate(some):
                if done is None or done.done():  # its client is gone
                    continue
                error = reply.error
                if error is None and added.codes[place]:
                    error = error_from_code(added.codes[place], added.texts[place])
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
            # what has come meanwhile goes together
            self._is_sending = False
            self._send_soon()

        mailbox = self._boot.mailbox
        mailbox.call(COORDINATOR, message, on_reply=answered, timeout_ms=ADD_TIMEOUT_MS)
        self._note_told(len(some))
        self._loop.call_soon(self._turn)  # a call that fails at once ends there

    def _tell_again(self) -> None:
        """Tell a coordinator that has started again of the sign-ons that it had; what it refuses now ends elsewhere, too."""
        if self._loads:  # else what is known here comes from that coordinator
            self._issuers.tell_again()
            again = self._access.policy.sign_ons.all()
            self._waiting += [(msgspec.json.encode(record), "", None) for record in again]
            self._send_soon()
        self._loads = self._access.loads
        self._untold = len(self._waiting)
        self._note_told(0)

    def _note_told(self, count: int) -> None:
        """Note that so many records were sent; tell the coordinator if these were the last that it had known."""
        if self._untold is None:
            return
        self._untold -= count
        if self._untold <= 0:
            self._untold = None
            with suppress(DanubeError):  # it goes on in a moment without that
                self._boot.mailbox.notify(COORDINATOR, m.SignOnsTold())

    def _read_server_keys(self) -> None:
        """Read which public keys clients should pin; they may be rotated just now."""
        now_ns = self._boot.clock.monotonic_ns()
        if self._keys_ns is not None and now_ns - self._keys_ns < SERVER_KEY_NS:
            return
        self._keys_ns = now_ns
        try:
            self._server_keys = server_keys(Path(self._boot.config.data_dir))
        except DanubeError as error:  # those that were there are good still
            if not self._server_keys:
                raise
            _log.warning("the keys of the broker cannot be read: %s", error)


def main() -> int:
    """Run as `python -m danube_fast.workers.sign_on.sign_on --boot-fd N`; the exit code."""
    booted = boot()

    def run() -> None:
        try:
            process = SignOnProcess(booted)
            booted.freeze_heap()
            process.run()
        except DanubeError as error:
            with suppress(DanubeError):  # which would hide the cause
                booted.mailbox.notify(COORDINATOR, m.SignOnFailed(str(error)))
            raise
        booted.set_state(ProcessState.STOPPED)

    return booted.exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main())
