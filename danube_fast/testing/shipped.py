"""The shipped client in a simulation: its core, pump, connections, lanes and attachments as they are,
over loopback ports, without its timer thread.

    application (a generator) --steps--> core --> connection --LoopbackPort--> wire
    timers.serve <-- the schedule, when the pump's next deadline is due

A blocked call is a generator of `Wait`, as everywhere in the client; here it goes on as soon as what it
waits for is true, or its virtual time is up.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from danube_fast.client.core import Core
from danube_fast.client.link.dialer import Rings
from danube_fast.client.link.steps import Steps, Wait
from danube_fast.client.link.timers import TimerThread
from danube_fast.client.link.trust import Trust
from danube_fast.client.values.limits import FOREVER_NS
from danube_fast.clock import MICROSECOND_NS, MILLISECOND_NS
from danube_fast.errors import DanubeError
from danube_fast.testing.host import SimulatedHost
from danube_fast.testing.loopback import LoopbackServer, Network, Wire
from danube_fast.testing.virtual_clock import VirtualClock

__all__ = ["LoopbackPort", "ShippedClient"]

LINGER_NS = 20 * MILLISECOND_NS
"""What a closing port has sent still arrives."""
URL = "danube://bootstrap:1"


class LoopbackPort:
    """The part of a socket that a connection needs."""

    has_room = True

    def __init__(self, client: ShippedClient, server: LoopbackServer | None) -> None:
        self._client = client
        self._inbox: deque[list[bytes]] = deque()
        self._rest: list[bytes] = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.more = False
        """Parts follow the one that `receive_head` gave."""
        self.wire: Wire | None = None
        if server is not None:
            self.wire = client.network.connect(server, self._arrived)

    def _arrived(self, parts: list[bytes]) -> None:
        self._inbox.append(parts)
        self._client.stir()

    def fileno(self) -> int:
        """A descriptor that no process sleeps on."""
        return self._fd

    def readable(self) -> bool:
        """Whether a message waits."""
        return bool(self._inbox)

    def receive_head(self) -> bytes | None:
        """The next part if there is one."""
        if not self._inbox:
            return None
        head, *self._rest = self._inbox.popleft()
        self.more = bool(self._rest)
        return head

    def receive_rest(self) -> list[memoryview]:
        """The parts behind the head."""
        rest, self._rest = self._rest, []
        self.more = False
        return [memoryview(part) for part in rest]

    def post(self, *parts: Any) -> None:
        """Send a copy of one message."""
        if self.wire is not None:
            self.wire.up(*(bytes(part) for part in parts))

    def close(self, linger_ms: int) -> None:
        """No more; what was sent still arrives."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.is_read = False
            self._client.host.schedule.call(LINGER_NS, wire.cut)


class _Dialer:
    """Opens loopback ports for one connection."""

    claims: ClassVar[dict[str, str]] = {}

    def __init__(self, client: ShippedClient) -> None:
        self._client = client

    def open(self, endpoint: str) -> LoopbackPort:
        """A port; connected to nothing if no server listens there."""
        port = LoopbackPort(self._client, self._client.host.server_at(endpoint))
        self._client.ports.append(port)
        return port

    def next_look_ns(self, limit_ns: int) -> int:
        """Nothing to look at before."""
        return limit_ns

    def verdict(self, now_ns: int) -> DanubeError | None:
        """There is always hope."""
        return None

    redials = False

    def denied(self, error: DanubeError) -> DanubeError | None:
        """There is no other way in."""
        return error

    def settle(self, *, is_open: bool = False) -> None:
        """Nothing is watched."""

    def lost(self, port: Any, *, was_open: bool) -> DanubeError | None:
        """Rings are not simulated."""
        return None


class _Machine:
    """Stands in for `client.machine.Machine`."""

    def __init__(self, client: ShippedClient) -> None:
        self.clock = client.host.clock
        self._client = client

    def close(self) -> None:
        """Nothing to give back."""

    def make_dialer(self, rings: Rings, trust: Trust) -> _Dialer:
        """Of loopback ports."""
        return _Dialer(self._client)

    def start(self, timers: TimerThread) -> None:
        """The schedule serves it."""
        self._client.timers = timers

    def new_name(self, beginning: str) -> str:
        """One that was not used before."""
        return f"{beginning}-{self._client.host.next_number()}"

    def host_id(self) -> str:
        """Another host than the broker's: there are no rings and no ipc here."""
        return "elsewhere"

    def process_id(self) -> int:
        """The process id that all simulated clients share."""
        return 1


Application = Callable[["ShippedClient", Core], Steps[None]]


class ShippedClient:
    """One process with one client, whose application is a generator that never ends."""

    def __init__(
        self,
        name: str,
        host: SimulatedHost,
        network: Network,
        draw: random.Random,
        application: Application,
    ) -> None:
        self.name = name
        self.host = host
        self.network = network
        self.draw = draw
        self.clock: VirtualClock = host.clock
        self.is_alive = False
        self.is_calm = False
        """No more tricks: the run comes to its end."""
        self.is_done = False
        """Its application says that it owes nothing."""
        self.life = 0
        self.timers: TimerThread | None = None
        self.ports: list[LoopbackPort] = []
        self.core: Core | None = None
        self._application = application
        self._running: Steps[None] | None = None
        self._wait: Wait | None = None
        self._stopped_until_ns = 0
        self._due_ns = -1
        self.errors: list[str] = []
        """What the application was told, for a text."""

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """The process begins."""
        self.life += 1
        self.is_alive = True
        self._due_ns = -1
        machine: Any = _Machine(self)
        core = self.core = Core(
            URL, name=self.name, token=None, tls=None, transport="zmq", machine=machine
        )
        core.pump.on_progress = self.stir
        self._running = self._application(self, core)
        self._wait = None
        self._step(first=True)

    def kill(self) -> None:
        """SIGKILL."""
        self.life += 1
        self.is_alive = False
        core, self.core = self.core, None
        running, self._running = self._running, None
        self._wait = None
        silently = self.draw.random() < 0.3
        for port in self.ports:
            if port.wire is not None:
                port.wire.cut(silently=silently)
        if core is not None:
            core.pump.on_progress = None
            core.shut()
        if running is not None:
            running.close()
        self.ports.clear()

    def stop(self, duration_ns: int) -> None:
        """SIGSTOP for so long."""
        self._stopped_until_ns = self.clock.now_ns + duration_ns
        for port in self.ports:
            if port.wire is not None:
                port.wire.is_read = False
        life = self.life

        def go_on() -> None:
            if life == self.life:
                for port in list(self.ports):
                    if port.wire is not None:
                        port.wire.read_again()
                self.stir()

        self.host.schedule.call(duration_ns, go_on)

    def lose_connection(self) -> None:
        """All connections end."""
        for port in self.ports:
            if port.wire is not None:
                port.wire.cut(silently=self.draw.random() < 0.4)

    # ------------------------------------------------------------ turns

    def stir(self) -> None:
        """Something happened: look at it soon."""
        self._turn_at(self.clock.now_ns + 5 * MICROSECOND_NS)

    def _turn_at(self, due_ns: int) -> None:
        if not self.is_alive or 0 <= self._due_ns <= due_ns:
            return
        self._due_ns = due_ns
        life = self.life

        def turn() -> None:
            if life == self.life and self._due_ns == due_ns:
                self._due_ns = -1
                self._turn()

        self.host.schedule.call(due_ns - self.clock.now_ns, turn)

    def _turn(self) -> None:
        if self.clock.now_ns < self._stopped_until_ns:
            self._turn_at(self._stopped_until_ns)
            return
        core, timers = self.core, self.timers
        if core is None or timers is None:
            return
        with core.pump.lock:
            core.pump.drain()
            if core.pump.next_deadline_ns() <= self.clock.now_ns:
                timers.serve(signalled=True)
        self._call_back(core)
        self._step()

    def _call_back(self, core: Core) -> None:
        while core.pump.callbacks:
            function, arguments = core.pump.callbacks.popleft()
            function(*arguments)

    def _step(self, *, first: bool = False) -> None:
        """Go on with the application as far as it goes."""
        core = self.core
        running = self._running
        while core is not None and running is not None and core is self.core:
            wait = self._wait
            try:
                if first:
                    first = False
                    self._wait = next(running)
                    continue
                if wait is None:
                    return
                with core.pump.lock:
                    ready = wait.ready()
                if not ready and self.clock.now_ns < wait.deadline_ns:
                    break
                self._wait = running.send(ready)
            except StopIteration:
                self._running = None
                return
            self._call_back(core)
        self._arm()

    def _arm(self) -> None:
        core = self.core
        if core is None:
            return
        with core.pump.lock:
            due_ns = core.pump.next_deadline_ns()
        if self._wait is not None:
            due_ns = min(due_ns, self._wait.deadline_ns)
        if due_ns < FOREVER_NS:
            self._turn_at(max(due_ns, self.clock.now_ns))

    # ------------------------------------------------------------ for applications

    def sleep_steps(self, duration_ns: int) -> Iterator[Wait]:
        """The application does something else for so long."""
        yield Wait(lambda: False, self.clock.now_ns + duration_ns)
