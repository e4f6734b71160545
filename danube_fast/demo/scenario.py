"""The demo's story: broker up, flights through it, one worker killed on the way, everything counted.

serve --> ready --> topic --> producers and consumers connected --> go
  stream ... a third consumed: SIGKILL to the busier worker ... stream
  every subscription has every offset (or nothing moves any more) --> stop --> all into the object store,
  logs trimmed, read back --> counted and exported by Spark, if there is one --> judge --> clean up
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import msgspec

import danube_fast
from danube_fast.clock import SystemClock
from danube_fast.demo import dataset
from danube_fast.demo.analysis import Analysis, analyse, analysis_problems
from danube_fast.demo.check import Catalogue, Kill, Subscription, judge, problems_of
from danube_fast.demo.crew import Crew
from danube_fast.demo.history import History, history_problems, read_back
from danube_fast.demo.progress import View
from danube_fast.demo.records import read_records
from danube_fast.demo.stage import PARTITIONS, PRODUCERS, SUBSCRIPTIONS, TOPIC, WORKERS, Stage

__all__ = ["Options", "Outcome", "run"]

DISPATCH = "reliable"
DURABILITY = "fsync"
FOLDER_PREFIX = "danube-fast-demo-"
KILL_AFTER = 1 / 3
"""Share of the messages that the first subscription has when the kill comes."""
STALL_SECONDS = 30.0
"""Nothing new for so long: what is missing will not come."""
LAG_TIMEOUT_SECONDS = 5.0


class Options(NamedTuple):
    """The options of the command line."""

    messages: int = dataset.FLIGHT_COUNT
    messages_per_s: float = 60_000.0
    """Pace of all producers together; 0: as fast as they can."""
    with_spark: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All that the demo found out."""

    ok: bool
    problems: list[str]
    messages: int
    payload_bytes: int
    producers: int
    workers: int
    partitions: int
    durability: str
    pace_messages_per_s: float
    published_messages_per_s: float
    """From the first send to the last ack."""
    kill: Kill | None
    worker_restarts: int
    """Of the killed worker, as the broker counts."""
    subscriptions: list[Subscription]
    carriers: dict[str, int]
    """Flights by carrier in the data set."""
    seconds: float
    history: History | None = None
    """All flights, read back from the object store."""
    analysis: Analysis | None = None
    """The answers of Spark; None: without."""


class _Demo:
    """One run."""

    def __init__(self, options: Options, view: View, stage: Stage) -> None:
        self._options = options
        self._view = view
        self._stage = stage
        self._clock = SystemClock()
        self._kill: Kill | None = None
        self._partitions_of_worker: dict[int, list[int]] = {}

    def run(self, data_path: Path) -> Outcome:
        """The whole story."""
        stage, options = self._stage, self._options
        stage.start_broker()
        flights = dataset.load(data_path, options.messages)
        catalogue = Catalogue(flights)
        stage.wait_for_broker()
        with danube_fast.connect(stage.ready["url"], name="demo") as client:
            self._make_topic(client)
            stage.start_members(data_path, options.messages, options.messages_per_s)
            self._stream()
            stage.stop_members()
            unacked = self._unacked(client)
            restarts = self._restarts(client)
            history = read_back(client, stage, catalogue)
        analysis = None
        if options.with_spark:
            analysis = analyse(stage, stage.ready["url"], catalogue)
        self._view.say("checking every message against the data set")
        subscriptions = self._judge(catalogue, unacked)
        problems = [text for each in subscriptions for text in problems_of(catalogue, each)]
        problems += self._broker_problems(restarts)
        problems += history_problems(catalogue, history)
        if analysis is not None:
            problems += analysis_problems(catalogue, analysis)
        payload_bytes = sum(map(len, flights.rows))
        outcome = self._outcome(catalogue, payload_bytes, subscriptions, problems, restarts)
        return msgspec.structs.replace(outcome, history=history, analysis=analysis)

    # ------------------------------------------------------------ acts

    def _make_topic(self, client: danube_fast.Client) -> None:
        """Create the topic and learn which worker serves which partition."""
        client.admin.create_topic(
            TOPIC, dispatch=DISPATCH, durability=DURABILITY, partitions=PARTITIONS
        )
        client.admin.set_topic_policy(TOPIC, {"retention_policy": "forever"})
        placement = client.admin.describe_topic(TOPIC)["placement"]
        for number, place in enumerate(placement):
            self._partitions_of_worker.setdefault(int(place["worker"]), []).append(number)

    def _stream(self) -> None:
        """Let them run until every subscription has every offset, or nothing moves any more."""
        stage, total, pace = self._stage, self._options.messages, self._options.messages_per_s
        how = "as fast as they can"
        if pace:
            how = f"paced to {pace:,.0f} a second so that the kill falls into the middle"
        self._view.say(f"streaming {total:,} flights through {PARTITIONS} partitions, {how}")
        names = [f"{name} ({type_name})" for name, type_name, _ in SUBSCRIPTIONS]
        stage.go()
        last, last_ns = (-1, -1), self._clock.monotonic_ns()
        while True:
            stage.listen()
            counts = [party.distinct for party in stage.subscriptions]
            published = stage.producers.handed
            shown = {"published": published, **dict(zip(names, counts, strict=True))}
            self._view.show(shown, total)
            if self._kill is None and counts[0] >= total * KILL_AFTER:
                self._kill_a_worker()
            if len(stage.producers.done) == PRODUCERS and min(counts) >= total:
                break
            now_ns = self._clock.monotonic_ns()
            if (published, sum(counts)) != last:
                last, last_ns = (published, sum(counts)), now_ns
            elif now_ns - last_ns > STALL_SECONDS * 1e9:
                self._view.say(
                    f"nothing new for {STALL_SECONDS:g} s: counting what is there", "red"
                )
                break
        self._view.rest()

    def _kill_a_worker(self) -> None:
        """SIGKILL to the worker out of which most messages have come so far."""
        stage, partitions = self._stage, self._partitions_of_worker
        first = stage.subscriptions[0]
        worker = max(partitions, key=lambda number: first.in_partitions(partitions[number]))
        pid = int(stage.ready["worker_pids"][worker])
        self._kill = Kill(
            worker=worker,
            pid=pid,
            kill_ns=self._clock.wall_ns(),
            partitions=partitions[worker],
        )
        os.kill(pid, signal.SIGKILL)
        self._view.say(f"killed worker {worker} (pid {pid}) with SIGKILL", "bold red")

    def _unacked(self, client: danube_fast.Client) -> dict[str, int]:
        """Count what the broker has as not acked, by subscription, given a moment to come to rest."""
        lags: dict[str, int] = {}
        deadline_ns = self._clock.monotonic_ns() + int(LAG_TIMEOUT_SECONDS * 1e9)
        while self._clock.monotonic_ns() < deadline_ns:
            for name, _, _ in SUBSCRIPTIONS:
                answer = client.admin.describe_subscription(TOPIC, name)
                lags[name] = int(answer["lag_messages"])
            if not any(lags.values()):
                break
            self._stage.listen()
        return lags

    def _restarts(self, client: danube_fast.Client) -> int:
        """How often the killed worker was started again, as the broker counts."""
        if self._kill is None:
            return 0
        name = f"worker-{self._kill.worker}"
        processes = client.admin.cluster_status()["processes"]
        return sum(int(entry["restarts"]) for entry in processes if entry["process"] == name)

    # ------------------------------------------------------------ judgement

    def _judge(self, catalogue: Catalogue, unacked: dict[str, int]) -> list[Subscription]:
        results = []
        for party, (name, type_name, _) in zip(
            self._stage.subscriptions, SUBSCRIPTIONS, strict=True
        ):
            parts = [read_records(path) for path in self._stage.records_of(party)]
            result = judge(
                catalogue,
                parts,
                name=name,
                type_name=type_name,
                producers=PRODUCERS,
                kill=self._kill,
            )
            results.append(msgspec.structs.replace(result, unacked=unacked[name]))
        return results

    def _broker_problems(self, restarts: int) -> list[str]:
        problems = []
        done = len(self._stage.producers.done)
        if done < PRODUCERS:
            problems.append(f"only {done} of {PRODUCERS} producers had everything acked")
        if self._kill is None:
            problems.append("the stream never got so far that a worker was killed")
        elif not restarts:
            problems.append("the killed worker was not started again")
        return problems

    def _outcome(
        self,
        catalogue: Catalogue,
        payload_bytes: int,
        subscriptions: list[Subscription],
        problems: list[str],
        restarts: int,
    ) -> Outcome:
        done = self._stage.producers.done.values()
        first_ns = min((event.first_ns for event in done), default=0)
        last_ns = max((event.last_ns for event in done), default=0)
        published = sum(event.messages for event in done)
        return Outcome(
            ok=not problems,
            problems=problems,
            messages=catalogue.count,
            payload_bytes=payload_bytes,
            producers=PRODUCERS,
            workers=WORKERS,
            partitions=PARTITIONS,
            durability=DURABILITY,
            pace_messages_per_s=self._options.messages_per_s,
            published_messages_per_s=published / max((last_ns - first_ns) / 1e9, 1e-9),
            kill=self._kill,
            worker_restarts=restarts,
            subscriptions=subscriptions,
            carriers=catalogue.carriers,
            seconds=self._view.seconds,
        )


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: through everything that cleans up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """While cleaning up: a second Ctrl-C must not leave anything behind. Cleaning up is bounded."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def run(options: Options, view: View) -> Outcome:
    """Run the demo; call from the main thread. Raises NotFound without the data set, other errors
    when it cannot go on, KeyboardInterrupt on Ctrl-C; no process and no file is left in any case."""
    data_path = dataset.find()
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(_signals())
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX))
        crew = cleanup.enter_context(Crew())
        cleanup.callback(view.say, "stopping the broker, removing its files")
        cleanup.enter_context(view)
        cleanup.callback(_ignore_signals)
        return _Demo(options, view, Stage(crew, Path(folder), view)).run(data_path)
