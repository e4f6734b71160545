"""The simulation: a broker and its clients under one seed.

    python -m danube_fast.testing.simulation --seed 17            one seed, with its trace hash
    python -m danube_fast.testing.simulation --seeds 0:2000       many, until one fails
    python -m danube_fast.testing.simulation --seed 17 --verbose  every command and fault

The workers, their logs and the codec are the shipped ones; clock, disk, network and clients are
simulated, and a model that shares nothing with the engine checks every promise (docs/simulation.md).
The same seed gives the same run, to the last byte.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.testing.applications import SIZES, publisher, receiver
from danube_fast.testing.auditor import Auditor
from danube_fast.testing.consumer import ScriptedConsumer
from danube_fast.testing.faults import Faults
from danube_fast.testing.faulty_store import FaultyStore
from danube_fast.testing.history_auditor import HistoryAuditor
from danube_fast.testing.history_plan import HistoryBounds, HistoryPlan
from danube_fast.testing.host import SimulatedHost, SimulatedWorker
from danube_fast.testing.loopback import Network
from danube_fast.testing.model import Model
from danube_fast.testing.peer import Peer
from danube_fast.testing.producer import ScriptedProducer
from danube_fast.testing.publishing_model import PartitionModel, Violation
from danube_fast.testing.rereader import Rereader
from danube_fast.testing.scenario import DEAD_LETTERS, Bounds, Scenario
from danube_fast.testing.shipped import Application, ShippedClient
from danube_fast.testing.virtual_clock import Schedule, Trace, VirtualClock
from danube_fast.testing.worker_tap import WorkerTap

__all__ = ["Outcome", "Simulation", "run_seed"]

STEPS = 8
"""Faults in one run, at most."""
CALM_NS = 40 * SECOND_NS
"""When nothing fails any more, everything that is owed arrives within this time."""
LOOK_NS = 200 * MILLISECOND_NS
"""How often workers and store are compared."""
AUDIT_NS = 10 * SECOND_NS
"""So long it may take to read everything."""
FAST_FOLDER = Path("/dev/shm")  # noqa: S108 - files of one run, in a folder of its own


class Outcome(NamedTuple):
    """How a run ended."""

    seed: int
    digest: str
    fault: str
    """Which promise was broken; empty: none was."""
    accepted: int
    delivered: int
    acked: int
    events: int
    lines: list[str]


class Simulation:
    """One run."""

    def __init__(self, scenario: Scenario, directory: Path, *, verbose: bool = False) -> None:
        self.scenario = scenario
        self._bounds = Bounds.present()
        seed = scenario.seed
        self.clock = VirtualClock()
        self.trace = Trace(self.clock)
        self.trace.is_verbose = verbose
        self.trace.hidden = str(directory)
        self.schedule = Schedule(self.clock)
        settings = scenario.settings(str(directory))
        self.model = Model(self.clock, self.trace, settings)
        self.host = SimulatedHost(
            directory, settings, self.schedule, random.Random(f"host {seed}"), self.trace
        )
        self.network = Network(self.schedule, random.Random(f"network {seed}"))
        self.taps = [WorkerTap(self.model, index + 1) for index in range(scenario.worker_count)]
        self.host.add_workers(
            scenario.worker_count, scenario.log_count, lambda index: self.taps[index - 1]
        )
        for tap, worker in zip(self.taps, self.host.workers, strict=True):
            tap.synced_position = worker.synced_position
        self._history_bounds: HistoryBounds | None = None
        if scenario.history is not None:
            self._add_uploader(scenario.history)
        self.host.on_down = self._worker_down
        self.host.on_power_cut = self.model.lost_power
        self.host.on_moved = self.model.moved
        self.peers: list[Peer | ShippedClient] = []
        self.topics: dict[str, list[int]] = {}
        """Partition ids by topic."""
        self._late: dict[str, int] = {}
        """Peers that begin late, and when."""
        self._make_topics()
        self.history: HistoryAuditor | None = None
        if self.host.uploader is not None:
            store = self.host.uploader.store
            self.history = HistoryAuditor(self.host, store.objects, self._kept())
            store.on_made = self.history.look
        self._make_clients(random.Random(f"clients {seed}"))
        if scenario.has_shipped:
            self._make_shipped(random.Random(f"shipped {seed}"))
        self.faults = Faults(scenario, self.host, self.network, self.peers, self.partition_ids)
        if self.host.uploader is not None:
            self.host.uploader.store.on_way = self.faults.end_waiting_uploader

    # ------------------------------------------------------------ making

    def _add_uploader(self, plan: HistoryPlan) -> None:
        self._history_bounds = plan.bounds.present()
        draw = random.Random(f"store {self.scenario.seed}")
        self.host.add_uploader(FaultyStore(self.schedule, draw, self.trace, plan.store_faults))

    def _make_topics(self) -> None:
        shapes = [
            (each.topic, each.durability, each.partitions, each.policy)
            for each in self.scenario.topics
        ]
        for topic, durability, partitions, policy in [*shapes, (DEAD_LETTERS, "fsync", 1, {})]:
            ids = self.topics[topic] = self.host.create_topic(topic, durability, partitions, policy)
            for index, partition_id in enumerate(ids):
                self.model.add_partition(partition_id, durability, topic, index)
                if topic == DEAD_LETTERS:
                    self.model.letters[partition_id] = topic

    def _kept(self) -> list[PartitionModel]:
        """Partitions whose messages stay, in the log and then in the store."""
        shapes = [
            each
            for each in self.scenario.topics
            if each.durability != "memory"
            and each.policy.get("retention_policy", "until_acked") != "until_acked"
        ]
        ids = [number for shape in shapes for number in self.topics[shape.topic]]
        return [self.model.partitions[number] for number in ids]

    @property
    def partition_ids(self) -> list[int]:
        """All partitions but those of dead letters."""
        ids = [ids for topic, ids in self.topics.items() if topic != DEAD_LETTERS]
        return [each for some in ids for each in some]

    def _partitions_on(self, ids: list[int], worker: SimulatedWorker) -> list[int]:
        return [each for each in ids if self.host.worker_of(each) is worker]

    def _make_clients(self, draw: random.Random) -> None:
        scenario = self.scenario
        letters = self.topics[DEAD_LETTERS]
        for worker in self.host.workers:
            mine = self._partitions_on(self.partition_ids, worker)
            mine = [] if scenario.has_moves else mine
            for number in range(scenario.producers_per_worker if mine else 0):
                name = f"producer-{worker.index}-{number}"
                own = random.Random(draw.random())
                producer = ScriptedProducer(
                    name, self.host, self.network, worker, own, mine, scenario.messages_max
                )
                producer.repeats = scenario.has_repeats
                producer.delays_ms = scenario.delays_ms
                producer.payload_sizes = self._sizes(producer.payload_sizes)
                if scenario.history is not None:
                    producer.bundle_bytes = scenario.history.bundle_bytes
                producer.delays_share = scenario.delays_share
                self.peers.append(producer)
            for shape in scenario.topics:
                ids = self._partitions_on(self.topics[shape.topic], worker)
                ids = [] if scenario.has_moves else ids
                for plan in shape.subscriptions if ids else ():
                    for number, temper in enumerate(plan.tempers):
                        options: dict[str, Any] = {"failure_policy": plan.policy}
                        if plan.filters[number]:
                            options["key_filters"] = plan.filters[number]
                        name = f"{plan.name}-{shape.topic[-1:]}{worker.index}-{number}"
                        if plan.late_ns:
                            self._late[name] = plan.late_ns
                        else:
                            name = f"{plan.name}-{worker.index}-{number}"
                        self._add_consumer(
                            name, worker, draw, ids, plan.name,
                            plan.kind, temper, options, plan.permits[number],
                        )  # fmt: skip
            self._add_rereader(worker, draw)
            ids = self._partitions_on(letters, worker)
            if ids:
                self._add_consumer(
                    "undertaker", worker, draw, ids, "letters", "exclusive", "good", {}, 1000
                )

    def _sizes(self, usual: tuple[int, ...]) -> tuple[int, ...]:
        return usual if self.scenario.history is None else self.scenario.history.sizes

    def _add_rereader(self, worker: SimulatedWorker, draw: random.Random) -> None:
        if self.history is None or self.scenario.has_moves:
            return
        mine = [each for each in self._kept() if self.host.worker_of(each.partition_id) is worker]
        if mine:
            own = random.Random(draw.random())
            name = f"rereader-{worker.index}"
            self.peers.append(Rereader(name, self.host, self.network, worker, own, mine))

    def _make_shipped(self, draw: random.Random) -> None:
        """Clients as they are shipped, beside the scripted ones."""
        for number, shape in enumerate(self.scenario.topics):
            sender = publisher(
                self.model, shape.topic, self.scenario.messages_max // 2,
                self.scenario.delays_ms, moves=self.scenario.has_moves, sizes=self._sizes(SIZES),
            )  # fmt: skip
            self._add_shipped(f"sender-{number}", draw, sender)
            for plan in shape.subscriptions:
                options: dict[str, Any] = {"failure_policy": plan.policy}
                count = len(plan.tempers) if self.scenario.has_moves else 1
                for place in range(count):
                    taker = receiver(
                        self.model,
                        shape.topic,
                        plan.name,
                        plan.kind,
                        options,
                        plan.permits[0],
                        self.scenario.permits_bytes,
                    )
                    name = f"taker-{number}-{plan.name}-{place}"
                    if plan.late_ns:
                        self._late[name] = plan.late_ns
                    self._add_shipped(name, draw, taker)

    def _add_shipped(self, name: str, draw: random.Random, application: Application) -> None:
        own = random.Random(draw.random())
        self.peers.append(ShippedClient(name, self.host, self.network, own, application))

    def _add_consumer(
        self, name: str, worker: SimulatedWorker, draw: random.Random, ids: list[int],
        subscription: str, kind: str, temper: str, options: dict[str, Any], permits: int,
    ) -> None:  # fmt: skip
        own = random.Random(draw.random())
        self.peers.append(
            ScriptedConsumer(
                name, self.host, self.network, worker, own, partition_ids=ids,
                subscription=subscription, kind=kind, temper=temper, options=options,
                permits=permits, permits_bytes=self.scenario.permits_bytes,
            )
        )  # fmt: skip

    # ------------------------------------------------------------ running

    def _worker_down(self, worker: SimulatedWorker) -> None:
        everything = [each for ids in self.topics.values() for each in ids]
        ids = set(self._partitions_on(everything, worker))
        self.taps[worker.index - 1].died(ids)

    def run(self) -> None:
        """From the first start to the end. Raises Violation."""
        if self.scenario.bounds is not None:
            self.scenario.bounds.set()
        if self.scenario.history is not None:
            self.scenario.history.bounds.set()
            self.schedule.call(LOOK_NS, self._look)
        self.host.start()
        for peer in self.peers:
            delay_ns = self.scenario.draw.randrange(300 * MILLISECOND_NS)
            delay_ns = self._late.get(peer.name, delay_ns)
            self.schedule.call(delay_ns, lambda peer=peer: self._begin(peer))  # type: ignore[misc]
        for due_ns, fault in self.scenario.faults:
            self.schedule.call(due_ns, lambda fault=fault: self.faults.happen(fault))  # type: ignore[misc]
        self.schedule.run(self.scenario.chaos_ns)
        self.trace.note("calm")
        self.faults.heal()
        for peer in self.peers:
            peer.is_calm = True
        if not self.schedule.run(CALM_NS, self._is_finished):
            open_frames = [
                peer.name
                for peer in self.peers
                if isinstance(peer, ScriptedProducer | ShippedClient) and not peer.is_done
            ]
            raise Violation(
                f"{CALM_NS // SECOND_NS} s after the last fault: {'; '.join(self.model.owed())}"
                + (f"; not acked: {', '.join(open_frames)}" if open_frames else "")
                + (f"; {self.history.waiting()}" if self.history is not None else "")
            )
        self._audit()

    def _begin(self, peer: Peer | ShippedClient) -> None:
        if not peer.is_alive:  # a late one is begun by the end of all faults, too
            peer.start()

    def _look(self) -> None:
        if self.history is not None:
            self.history.look()
            self.schedule.call(LOOK_NS, self._look)

    def _audit(self) -> None:
        """Everything ends, starts again, and is read from the beginning."""
        for peer in self.peers:
            if peer.is_alive:
                peer.kill()
        self.faults.end_all()
        held = self.history.verify() if self.history is not None else {}
        self.host.start()
        auditors = [self._auditor(worker, held) for worker in self.host.workers]
        for auditor in auditors:
            auditor.start()
        if not self.schedule.run(AUDIT_NS, lambda: all(each.is_done for each in auditors)):
            raise Violation(f"after the last crash {'; '.join(x.missing() for x in auditors)}")
        if self.history is not None:
            self.history.look()

    def _auditor(self, worker: SimulatedWorker, held: dict[int, set[int]]) -> Auditor:
        mine = [
            self.model.partitions[each]
            for ids in self.topics.values()
            for each in self._partitions_on(ids, worker)
        ]
        return Auditor(
            self.host, self.network, worker, random.Random(self.scenario.seed), mine, held
        )

    def _is_finished(self) -> bool:
        done = all(
            peer.is_done
            for peer in self.peers
            if isinstance(peer, ScriptedProducer | ShippedClient)
        )
        return (
            done
            and not self.model.owed()
            and not (self.history is not None and self.history.waiting())
        )

    def close(self) -> None:
        """Give everything back."""
        self._bounds.set()
        if self._history_bounds is not None:
            self._history_bounds.set()
        for peer in self.peers:
            if isinstance(peer, ShippedClient) and peer.is_alive:
                peer.kill()
        self.host.close()


def run_seed(
    seed: int,
    *,
    steps: int = STEPS,
    moves: float = 0.0,
    history: float = 0.0,
    verbose: bool = False,
) -> Outcome:
    """One run of one seed, in a folder that is gone afterwards."""
    parent = str(FAST_FOLDER) if FAST_FOLDER.is_dir() else None
    # always of one length: errors name the folder, and a frame says how long its text is
    prefix = f"df-simulation-{os.getpid():010d}-"
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    logging.disable(logging.CRITICAL)
    simulation: Simulation | None = None
    fault = ""
    try:
        simulation = Simulation(Scenario(seed, steps, moves, history), directory, verbose=verbose)
        simulation.run()
    except Violation as violation:
        fault = str(violation)
    except Exception as error:
        # whatever a worker raises would have ended it
        fault = f"{type(error).__name__}: {error}"
        if verbose:
            raise
    finally:
        logging.disable(logging.NOTSET)
        if simulation is not None:
            simulation.close()
        shutil.rmtree(directory, ignore_errors=True)
    if simulation is None:
        return Outcome(seed, "", fault, 0, 0, 0, 0, [])
    model, trace = simulation.model, simulation.trace
    return Outcome(
        seed, trace.digest(), fault, model.messages_accepted, model.messages_delivered,
        model.messages_acked, simulation.schedule.event_count, list(trace.lines),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 if every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m danube_fast.testing.simulation")
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--seeds", default="0:100", help="A:B, from A to below B")
    parser.add_argument("--steps", type=int, default=STEPS, help="faults in one run, at most")
    parser.add_argument("--lines", type=int, default=40, help="last lines of the trace at a fault")
    parser.add_argument("--moves", type=float, default=0.0, help="share of runs with moves, 0 to 1")
    parser.add_argument("--history", type=float, default=0.0, help="share of runs with history")
    parser.add_argument("--verbose", action="store_true", help="print the whole trace")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last)) if options.seed is None else [options.seed]
    begun = time.monotonic()  # of the machine: how long it took
    totals = [0, 0, 0, 0]
    for number, seed in enumerate(seeds, 1):
        outcome = run_seed(
            seed, steps=options.steps, moves=options.moves, history=options.history,
            verbose=options.verbose,
        )  # fmt: skip
        totals = [total + count for total, count in zip(totals, outcome[3:7], strict=True)]
        if outcome.fault:
            print("\n".join(outcome.lines[-options.lines :]))
            print(f"seed {seed}: {outcome.fault}")
            print(f"trace {outcome.digest}; after {number} seeds, {time.monotonic() - begun:.1f} s")
            print(
                f"again: python -m danube_fast.testing.simulation --seed {seed}"
                f" --steps {options.steps} --moves {options.moves} --history {options.history}"
            )
            return 1
        if options.seed is not None:
            print(f"seed {seed}: trace {outcome.digest}")
    seconds = time.monotonic() - begun
    print(
        f"{len(seeds)} seeds in {seconds:.1f} s: {totals[0]:,} messages accepted, {totals[1]:,} "
        f"delivered, {totals[2]:,} acked, {totals[3]:,} events; every promise was kept"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
