"""Proofs of connections in one process of a secured broker: its key, who is let in, and the thread that ZeroMQ asks.

tcp     CURVE: the broker's key pair here, a registered public key there
ipc     the kernel's word for the local user
rings   the same, asked by `RingServer`
"""

from __future__ import annotations

from pathlib import Path

import zmq

from danube_fast.broker import messages as m
from danube_fast.clock import Clock
from danube_fast.config import Settings
from danube_fast.errors import DanubeError
from danube_fast.net.connection_guard import ConnectionGuard
from danube_fast.net.server import Server
from danube_fast.net.zap import ZapThread
from danube_fast.security.authorizers import load_authorizer
from danube_fast.security.curve import KeyPair
from danube_fast.security.server_keys import ServerKeys
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.denials import Denial, Denials, is_audited
from danube_fast.workers.process.mailbox import Mailbox, Request

__all__ = ["SecureTransport"]


class SecureTransport:
    """Prove who comes in."""

    def __init__(
        self, server_keys: ServerKeys, access: Access, zap: ZapThread, denials: Denials
    ) -> None:
        """Raises FailedPrecondition, InvalidArgument."""
        self.server_keys, self.access, self._zap = server_keys, access, zap
        self.keys: KeyPair = server_keys.active()
        """The pair with which this process listens."""
        self.denials = denials
        """What the process refuses."""
        self.guard: ConnectionGuard | None = None
        """Of the server; told of each refusal."""

    @classmethod
    def make(
        cls, settings: Settings, data_dir: Path, context: zmq.Context[zmq.Socket[bytes]], clock: Clock
    ) -> SecureTransport | None:  # fmt: skip
        """Make it with the broker's key pair; None if security is off. Raises FailedPrecondition, InvalidArgument,
        Unavailable."""
        if settings.auth == "none":
            return None
        timeout_ms = settings.worker_start_timeout_ms
        access = Access(clock, load_authorizer(settings.authorizer, clock, timeout_ms))
        denials = Denials(clock, is_on=is_audited(settings))

        def refused(proof: str, address: str) -> None:
            denials.note(Denial("connect", access.registered_to(proof), proof, address))
            if made.guard is not None:
                made.guard.failed.note(address)

        zap = ZapThread(context, access.admits, refused, 2 * settings.sessions_max)
        made = cls(ServerKeys(data_dir), access, zap, denials)
        return made

    def open(self, server: Server, mailbox: Mailbox | None = None) -> None:
        """Start to answer ZeroMQ; call it before sockets are bound. Raises Internal.

        `mailbox`: where the coordinator says that the key of `server` is another one now; None in itself.
        """
        self.guard = server.guard
        self._zap.start()

        def told(request: Request[m.UseServerKey]) -> None:
            try:
                request.reply(self.use_active_key(server))
            except DanubeError as error:
                request.fail(error)

        if mailbox is not None:
            mailbox.serve(m.UseServerKey, told)

    def use_active_key(self, server: Server) -> str:
        """Listen with the key pair that is in use now; its public key. Raises FailedPrecondition, InvalidArgument,
        Internal."""
        keys = self.server_keys.active()
        server.rekey(keys.secret)
        self.keys = keys
        return keys.public

    def close(self) -> None:
        """Answer no more; call it before the context ends."""
        self._zap.stop()

    def admits_user(self, user: int) -> bool:
        """Whether a local user may have rings."""
        access, proof = self.access, f"uid:{user}"
        is_admitted = access.is_fresh and access.principal_of(proof) is not None
        if access.is_fresh and not is_admitted:
            self.denials.note(Denial("connect", access.registered_to(proof), proof, proof, "rings"))
        return is_admitted
