"""The rotation of the server key in a running broker: which process listens with which key, until all have the right one.

    step --> files --UseServerKey--> worker, one after the other --> the answer --> the coordinator's own port

Workers are asked whenever the key that they have is not known to be the one in use: behind a step, when they have
started, and when this process has. A process that does not answer is asked again later and holds the others up once; one
that is down takes the right key when it starts. To change the key of a port ends its connections: clients make new ones
and resume their sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from danube_fast.broker import messages as m
from danube_fast.clock import MILLISECOND_NS, NEVER_NS, SECOND_NS, Clock
from danube_fast.errors import DanubeError, FailedPrecondition, InvalidArgument
from danube_fast.net.server import Server
from danube_fast.roles import COORDINATOR, Processes
from danube_fast.security.server_keys import Rotation, Stage
from danube_fast.workers.process.mailbox import Mailbox, Reply
from danube_fast.workers.process.secure_transport import SecureTransport

__all__ = ["ServerKeyRotation"]

_log = logging.getLogger(__name__)

ASK_TIMEOUT_MS = 2000
RETRY_NS = SECOND_NS
LOOK_NS = 200 * MILLISECOND_NS
RETIRE_WAIT_NS = 5 * SECOND_NS
"""How long a retirement waits for processes that are behind."""
OWN_DELAY_NS = 200 * MILLISECOND_NS
"""Time for the answer of a step to leave, before its connection ends."""
STEPS = ("prepare", "activate", "retire", "revert")

OnEnd = Callable[[Any, "DanubeError | None"], None]


class KeyContext(Protocol):
    """The coordinator's attributes for the rotation."""

    clock: Clock

    @property
    def processes(self) -> Processes:
        """The processes of this host."""
        ...

    def ready_epoch(self, worker: int) -> int:
        """Epoch of a worker that is ready, else 0."""
        ...


class ServerKeyRotation:
    """Have all processes of a broker listen with the key in use. Used by the coordinator's loop only."""

    def __init__(
        self, secured: SecureTransport | None, mailbox: Mailbox, server: Server, context: KeyContext
    ) -> None:
        """`secured`: the coordinator's own; None while security is off."""
        self._secured, self._mailbox, self._server = secured, mailbox, server
        self._context = context
        self._rotation = secured.server_keys.rotation() if secured is not None else None
        self._known: dict[int, tuple[int, str]] = {}
        """Worker -> epoch, and the public key with which it listens."""
        self._failed: dict[int, int] = {}
        """Worker that could not be asked -> when."""
        self._is_asking = False
        self._looked_ns = 0
        self._ends: list[OnEnd] = []
        """Told when every worker has the right key, or could not be asked."""
        self._retiring: list[tuple[int, OnEnd]] = []
        """Retirements that wait for processes, and until when."""
        self._own_ns = NEVER_NS
        """When this process changes its own key."""

    @property
    def keys(self) -> list[str]:
        """Public keys that clients should pin, the newest first; none while security is off."""
        return [] if self._rotation is None else self._rotation.keys

    def describe(self) -> dict[str, Any]:
        """Describe the keys; see the operation. Raises FailedPrecondition."""
        secured, rotation = self._opened()
        processes = self._context.processes
        rows = [{"process": processes.name(COORDINATOR), "key": secured.keys.public}]
        for worker in processes.workers:
            epoch, key = self._known.get(worker, (0, ""))
            is_known = epoch and epoch == self._context.ready_epoch(worker)
            rows.append({"process": processes.name(worker), "key": key if is_known else ""})
        return {
            "stage": rotation.stage.value,
            "active": rotation.active,
            "keys": rotation.keys,
            "processes": rows,
        }

    def step(self, step: str, on_end: OnEnd) -> None:
        """Take a step; see the operation. Raises FailedPrecondition, InvalidArgument."""
        secured, _ = self._opened()
        keys = secured.server_keys
        steps: dict[str, Callable[[], Rotation]] = {
            "prepare": keys.prepare, "activate": keys.activate, "retire": keys.retire, "revert": keys.revert,
        }  # fmt: skip
        if step not in steps:
            raise InvalidArgument(f"{step!r:.100} is no step; write {', '.join(STEPS)}")
        if step == "retire" and self._behind():
            wait_ns = self._context.clock.monotonic_ns() + RETIRE_WAIT_NS
            self._retiring.append((wait_ns, on_end))
            return
        self._rotation = steps[step]()
        _log.info(
            "server key: %s; in use: %s, to be pinned: %s",
            step, self._rotation.active, " ".join(self._rotation.keys),
        )  # fmt: skip
        if step in ("prepare", "retire"):
            on_end(self.describe(), None)
            return
        self._failed.clear()
        self._looked_ns = 0
        self._ends.append(on_end)

    def _opened(self) -> tuple[SecureTransport, Rotation]:
        if self._secured is None or self._rotation is None:
            raise FailedPrecondition(
                "this broker has no server key, as it asks no one who they are; serve it with --auth required"
            )
        return self._secured, self._rotation

    def _behind(self) -> list[str]:
        """List the processes that may listen with the key that is to be retired still."""
        _, rotation = self._opened()
        if rotation.stage is not Stage.ACTIVATED:
            return []
        rows = self.describe()["processes"]
        return [str(row["process"]) for row in rows if row["key"] != rotation.active]

    def _retire(self, now_ns: int) -> None:
        """Retire the key before once no process is behind; refuse it if that takes too long."""
        behind, waiting = self._behind(), self._retiring
        self._retiring = [each for each in waiting if behind and now_ns < each[0]]
        for until_ns, on_end in waiting:
            if not behind:
                try:
                    self.step("retire", on_end)
                except DanubeError as error:
                    on_end(None, error)
            elif now_ns >= until_ns:
                text = (
                    f"{', '.join(behind)} may listen with the key before still: wait until `danube-fast security "
                    "server-key show` says that all have the new one"
                )
                on_end(None, FailedPrecondition(text))

    # ---------------------------------------------------------------- processes

    def do_work(self, now_ns: int) -> None:
        """Ask the next worker whose key is not known to be the right one; then this process changes its own."""
        secured, rotation = self._secured, self._rotation
        if secured is None or rotation is None or self._is_asking:
            return
        if now_ns >= self._own_ns:
            self._own_ns = NEVER_NS
            self._use_own(secured)
        if now_ns - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = now_ns
        if self._retiring:
            self._retire(now_ns)
        for worker in self._context.processes.workers:
            epoch = self._context.ready_epoch(worker)
            if not epoch or self._known.get(worker) == (epoch, rotation.active):
                continue
            if now_ns - self._failed.get(worker, -RETRY_NS) >= RETRY_NS:
                self._ask(worker, epoch, rotation.active)
                return
        ends, self._ends = self._ends, []
        for on_end in ends:
            on_end(self.describe(), None)
        if secured.keys.public != rotation.active and self._own_ns == NEVER_NS:
            self._own_ns = now_ns + OWN_DELAY_NS

    def next_deadline_ns(self) -> int:
        """When there is something to do, monotonic."""
        if self._secured is None or self._is_asking:
            return NEVER_NS
        is_waited_for = self._ends or self._retiring
        return min(self._own_ns, self._looked_ns + LOOK_NS if is_waited_for else NEVER_NS)

    def _ask(self, worker: int, epoch: int, public: str) -> None:
        def told(reply: Reply) -> None:
            self._is_asking = False
            self._looked_ns = 0
            if reply.error is None:
                self._known[worker] = epoch, reply.value
            if reply.error is None and reply.value == public:
                self._failed.pop(worker, None)
                return
            if worker not in self._failed:
                _log.warning(
                    "%s does not listen with the server key in use yet, it is asked again: %s",
                    self._context.processes.name(worker), reply.error or "it has another one",
                )  # fmt: skip
            self._failed[worker] = self._context.clock.monotonic_ns()

        self._is_asking = True
        self._mailbox.call(worker, m.UseServerKey(public), on_reply=told, timeout_ms=ASK_TIMEOUT_MS)

    def _use_own(self, secured: SecureTransport) -> None:
        try:
            secured.use_active_key(self._server)
        except DanubeError as error:
            _log.error("the coordinator cannot listen with the server key in use: %s", error)
