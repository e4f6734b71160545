"""Faults of a simulated broker and its clients. Each is one method, named in `scenario.FAULTS`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import DanubeError
from danube_fast.testing.consumer import ScriptedConsumer
from danube_fast.testing.host import SimulatedHost
from danube_fast.testing.loopback import Network
from danube_fast.testing.peer import Peer
from danube_fast.testing.producer import ScriptedProducer
from danube_fast.testing.scenario import Scenario
from danube_fast.testing.shipped import ShippedClient

__all__ = ["Faults"]

DOWN_NS_MAX = 700 * MILLISECOND_NS
WAITING_SHARES = (0.2, 0.7)
"""How often an uploader ends whose write is on its way; that of a manifest."""


class Faults:
    """Faults of one run, drawn from its seed."""

    def __init__(
        self,
        scenario: Scenario,
        host: SimulatedHost,
        network: Network,
        peers: Sequence[Peer | ShippedClient],
        partition_ids: list[int],
    ) -> None:
        self._scenario, self._host, self._network, self._peers = scenario, host, network, peers
        self._clock, self._schedule, self._trace = host.clock, host.schedule, host.trace
        self._partition_ids = partition_ids
        self._draw = random.Random(f"faults {scenario.seed}")
        self._is_calm = False

    def happen(self, name: str) -> None:
        """The fault of that name, now."""
        if not self._is_calm:
            self._trace.note(f"fault: {name}")
            getattr(self, name)()

    def heal(self) -> None:
        """No fault any more; what is down comes up."""
        self._is_calm = True
        self._host.disk.slow_until_ns = self._host.disk.failures_due = 0
        self._network.slow_until_ns = 0
        if self._host.uploader is not None:
            self._host.uploader.store.heal()
        self._host.start()
        self._schedule.call(1 * SECOND_NS, self._restart_refusing)
        for peer in self._peers:
            if not peer.is_alive:
                peer.start()

    def end_all(self) -> None:
        """Every process is killed, or the power is cut."""
        if self._draw.random() < 0.5:
            self._host.cut_power()
            return
        for worker in self._host.workers:
            self._host.kill(worker)
        self._host.kill_uploader()

    def _restart_refusing(self) -> None:
        """After three failed syncs a log waits for an operator: here he is, once a second, for the last of
        them may be a slow one."""
        for worker in self._host.workers:
            if any(log.refusing for log in worker.worker.state.logs.values()):
                self._host.stop(worker)
        self._host.start()
        self._schedule.call(1 * SECOND_NS, self._restart_refusing)

    def _start_later(self) -> None:
        delay_ns = self._draw.randrange(5 * MILLISECOND_NS, DOWN_NS_MAX)
        self._schedule.call(delay_ns, self._host.start)

    # ------------------------------------------------------------ workers

    def kill_worker(self) -> None:
        """SIGKILL, and a restart after a while."""
        self._host.kill(self._draw.choice(self._host.workers))
        self._start_later()

    def stop_worker(self) -> None:
        """SIGTERM, and a restart."""
        self._host.stop(self._draw.choice(self._host.workers))
        self._start_later()

    def stall_worker(self) -> None:
        """SIGSTOP for a while."""
        worker = self._draw.choice(self._host.workers)
        worker.stalled_until_ns = self._clock.now_ns + self._draw.randrange(
            100 * MILLISECOND_NS, 1500 * MILLISECOND_NS
        )

    def kill_coordinator(self) -> None:
        """The coordinator is away for a while."""
        self._host.coordinator.kill()
        self._start_later()

    def cut_power(self) -> None:
        """The host goes down, and comes back."""
        self._host.cut_power()
        self._start_later()

    def cut_power_while_slow(self) -> None:
        """The host goes down while syncs take long."""
        self.slow_disk()
        self._schedule.call(
            self._draw.randrange(5 * MILLISECOND_NS, 100 * MILLISECOND_NS),
            lambda: self.happen("cut_power"),
        )

    def crowd_memory(self) -> None:
        """Others publish so much that none of these messages is left in memory, and a consumer that holds
        some leaves for a while."""
        for worker in (process.worker for process in self._host.workers if process.is_up):
            for partition in worker.state.catalog.by_id.values():
                if not partition.keeps_memory:
                    worker.tails.empty(partition)
        holding = [
            peer
            for peer in self._peers
            if isinstance(peer, ScriptedConsumer) and any(peer.in_hand.values())
        ]
        if holding:
            self._draw.choice(holding).leave()

    def move_partition(self) -> None:
        """A partition goes to another worker; or not, if that is not to be had just now."""
        partition_id = self._draw.choice(self._partition_ids)
        worker = self._draw.randrange(len(self._host.workers))
        try:
            self._host.coordinator.move(partition_id, worker)
        except DanubeError as error:
            self._trace.note(f"no move of {partition_id}: {error}")

    # ------------------------------------------------------------ disk, network, clock

    def fail_sync(self) -> None:
        """The next syncs fail."""
        self._host.disk.failures_due = self._draw.choice((1, 1, 2))

    def slow_disk(self) -> None:
        """Syncs take long for a while."""
        until_ns = self._clock.now_ns + self._draw.randrange(50 * MILLISECOND_NS, 1 * SECOND_NS)
        self._host.disk.slow_until_ns = until_ns

    def slow_network(self) -> None:
        """Messages take long for a while."""
        until_ns = self._clock.now_ns + self._draw.randrange(100 * MILLISECOND_NS, 1 * SECOND_NS)
        self._network.slow_until_ns = until_ns

    def move_wall_clock(self) -> None:
        """An operator sets the clock."""
        by_ns = self._draw.randrange(-3600 * SECOND_NS, 3600 * SECOND_NS)
        if self._scenario.delays_ms:
            by_ns = abs(by_ns)  # or else what is due would not be, for an hour
        self._clock.wall_at_zero_ns += by_ns

    # ------------------------------------------------------------ history

    def kill_uploader(self) -> None:
        """SIGKILL, and a restart after a while."""
        self._host.kill_uploader()
        self._start_later()

    def stall_uploader(self) -> None:
        """SIGSTOP for a while; what it has sent goes on."""
        if self._host.uploader is not None:
            until_ns = self._clock.now_ns + self._draw.randrange(50 * MILLISECOND_NS, 2 * SECOND_NS)
            self._host.uploader.stalled_until_ns = until_ns

    def end_waiting_uploader(self, is_manifest: bool) -> None:
        """End the uploader whose write is on its way, now and then; the next one begins before it arrives, maybe."""
        if not self._is_calm and self._draw.random() < WAITING_SHARES[is_manifest]:
            self._host.kill_uploader()
            delay_ns = self._draw.randrange(5 * MILLISECOND_NS, 100 * MILLISECOND_NS)
            self._schedule.call(delay_ns, self._host.start)

    def slow_store(self) -> None:
        """Calls of the store take long for a while."""
        if self._host.uploader is not None:
            until_ns = self._clock.now_ns + self._draw.randrange(50 * MILLISECOND_NS, 2 * SECOND_NS)
            self._host.uploader.store.slow_until_ns = until_ns

    def lose_store(self) -> None:
        """The store cannot be reached for a while."""
        if self._host.uploader is not None:
            until_ns = self._clock.now_ns + self._draw.randrange(50 * MILLISECOND_NS, 2 * SECOND_NS)
            self._host.uploader.store.away_until_ns = until_ns

    # ------------------------------------------------------------ clients

    def kill_client(self) -> None:
        """SIGKILL; it comes back."""
        peer = self._draw.choice(self._peers)
        if not peer.is_alive:
            return
        peer.kill()

        def start() -> None:
            if not peer.is_alive:
                peer.start()

        self._schedule.call(self._draw.randrange(10 * MILLISECOND_NS, 1500 * MILLISECOND_NS), start)

    def stop_client(self) -> None:
        """SIGSTOP for a while: alive, and silent."""
        peer = self._draw.choice(self._peers)
        peer.stop(self._draw.randrange(50 * MILLISECOND_NS, 2 * SECOND_NS))

    def lose_connection(self) -> None:
        """One connection ends."""
        self._draw.choice(self._peers).lose_connection()

    def start_twin(self) -> None:
        """A second process under the name of a producer, which is fenced; it is killed for good before the end."""
        firsts = [each for each in self._peers if isinstance(each, ScriptedProducer)]
        if not firsts:
            return
        first = self._draw.choice(firsts)
        twin = ScriptedProducer(
            first.name, self._host, self._network, first.worker, random.Random(self._draw.random()),
            first.partition_ids, 20,
        )  # fmt: skip
        twin.start()
        self._schedule.call(
            self._draw.randrange(50 * MILLISECOND_NS, 800 * MILLISECOND_NS), twin.kill
        )
