"""Single publishes over rings and sockets: many threads, workers that end or stand still, interrupts, forks, and every end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.errors import (
    DanubeError,
    DeadlineExceeded,
)
from tests.crash.rig import Server
from tests.shm.children import script
from tests.workers.broker import wait_until

SECONDS = 60.0
"""Longest wait for anything; most take milliseconds."""
SOON_SECONDS = 20.0
"""For what is promised to be quick, on a machine that may be busy."""
THREADS = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("straight") / "data"
    with Server(
        # the worker is stopped for a while, and a busy machine makes it long
        data_dir, workers=1, session_timeout_ms=300_000, heartbeat_timeout_ms=300_000,
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(params=["shm", "zmq"])
def transport(request: pytest.FixtureRequest) -> Any:
    """Each way in which messages go straight."""
    return request.param


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The worker stands still."""
    pid = server.pid_of(1)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until("the stop", lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stored(client: danube_fast.Client, topic: str) -> dict[int, bytes]:
    """All that a topic holds now: payload by offset."""
    found: dict[int, bytes] = {}
    with client.reader(topic, start="earliest", stop="latest") as reader:
        for batch in reader.batches():
            found.update({message.offset: message.payload for message in batch})
    return found


def waiting(client: danube_fast.Client) -> int:
    """How many threads wait for acks of their own, or lead."""
    pump = client._core.pump
    with pump.lock:
        return len(pump.answers.sleeping) + pump._followers + pump._asleep


class Team:
    """Threads that do the same, what came of each, and a bounded end."""

    def __init__(self, count: int, body: Callable[[int], Any]) -> None:
        self.outcomes: dict[int, Any] = {}
        self._body = body
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        try:
            self.outcomes[number] = self._body(number)
        except BaseException as error:  # a failure of any kind is an outcome
            self.outcomes[number] = error

    def join(self, seconds: float = SECONDS) -> dict[int, Any]:
        """What became of each, all within so many seconds."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [number for number, thread in enumerate(self._threads) if thread.is_alive()]
        assert not late, f"threads {late} have not ended within {seconds} s"
        return self.outcomes

    def results(self, seconds: float = SECONDS) -> dict[int, Any]:
        """What each returned; the first error is raised."""
        for outcome in self.join(seconds).values():
            if isinstance(outcome, BaseException):
                raise outcome
        return self.outcomes


# ---------------------------------------------------------------- threads


@pytest.mark.parametrize("shares_a_producer", [True, False])
@pytest.mark.parametrize("durability", ["memory", "fsync"])
def test_each_thread_gets_the_ids_of_its_own_messages(
    server: Server, transport: Any, durability: Any, shares_a_producer: bool
) -> None:
    name = f"/default/ids-{transport}-{durability}-{shares_a_producer}"
    count = 150
    with server.client(transport=transport) as client:
        topics = [name if shares_a_producer else f"{name}-{i % 5}" for i in range(THREADS)]
        if shares_a_producer:
            producers = [client.producer(name, durability=durability)] * THREADS
        else:
            producers = [client.producer(topic, durability=durability) for topic in topics]

        def body(number: int) -> list[tuple[bytes, Any]]:
            payloads = [b"%d %d" % (number, turn) for turn in range(count)]
            return [(payload, producers[number].publish(payload)) for payload in payloads]

        results = Team(THREADS, body).results()
        held = {topic: stored(client, topic) for topic in set(topics)}
    for number, published in results.items():
        for payload, message_id in published:
            assert message_id.topic == topics[number]
            assert held[topics[number]][message_id.offset] == payload
    counts = Counter(payload for topic in held for payload in held[topic].values())
    assert len(counts) == THREADS * count and set(counts.values()) == {1}


def test_a_killed_worker_loses_and_doubles_nothing_of_waiting_threads(
    tmp_path: Path, transport: Any
) -> None:
    """Killed while it stands still, with every thread inside, and while it works."""
    topic, count = "/default/killed", THREADS
    ended = threading.Event()
    with (
        Server(tmp_path / "data", workers=1) as server,
        server.client(transport=transport) as client,
    ):
        producers = [client.producer(topic) for _ in range(count)]
        acked: list[dict[int, bytes]] = [{} for _ in range(count)]
        sent = [0] * count

        def publish(number: int) -> None:
            payload = b"%d %d" % (number, sent[number])
            sent[number] += 1
            acked[number][producers[number].publish(payload).offset] = payload

        def go_on(number: int) -> None:
            while not ended.is_set():
                publish(number)

        with stopped(server):
            team = Team(count, publish)
            wait_until("all threads' waits", lambda: waiting(client) == count)
            server.kill("worker", 1)
        team.results()
        team = Team(count, go_on)
        for _ in range(2):
            marks = [len(each) + 20 for each in acked]
            wait_until("20 acks for each", lambda m=marks: reached(acked, m))
            server.kill("worker", 1)
        marks = [len(each) + 20 for each in acked]
        wait_until("20 acks for each, from the new worker", lambda: reached(acked, marks))
        ended.set()
        team.results()
        held = stored(client, topic)
    for each in acked:
        assert {offset: held[offset] for offset in each} == each
    counts = Counter(held.values())
    assert set(counts.values()) == {1} and len(counts) == sum(sent)


def reached(acked: list[dict[int, bytes]], marks: list[int]) -> bool:
    """Whether each thread has so many acks."""
    return all(len(each) >= mark for each, mark in zip(acked, marks, strict=True))


@pytest.mark.parametrize("receives", [False, True])
def test_a_busy_thread_beside_holds_nothing_up_for_long(
    server: Server, transport: Any, receives: bool
) -> None:
    topic, count = f"/default/busy-{transport}-{receives}", 200
    ended = threading.Event()

    def spin(_: int) -> int:
        turns = 0
        while not ended.is_set():
            turns += 1
        return turns

    with server.client(transport=transport) as client:
        producer = client.producer(topic, durability="memory")
        consumer = client.consumer(topic, subscription="s") if receives else None
        busy = Team(1, spin)
        try:
            began = time.monotonic()
            for number in range(count):
                producer.publish(b"%d" % number)
                if consumer is not None:
                    message = consumer.receive(timeout=SECONDS)
                    assert message is not None and int(message.payload) == number
                    consumer.ack(message)
            took = time.monotonic() - began
        finally:
            ended.set()
        assert busy.results()[0] > count
        assert took < count * 0.1, f"{count} round trips took {took:.1f} s"


# ---------------------------------------------------------------- a worker that stands still


def test_a_producers_timeout_ends_a_publish(server: Server, transport: Any) -> None:
    topic, timeout = f"/default/late-{transport}", 2.0
    with server.client(transport=transport) as client:
        producer = client.producer(topic, timeout=timeout)
        producer.publish(b"before")
        with stopped(server):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="may have been stored"):
                producer.publish(b"late")
            took = time.monotonic() - began
        assert timeout <= took < timeout + SOON_SECONDS
        wait_until("the lane's return", lambda: is_published(producer, b"after"))
        payloads = [*stored(client, topic).values()]
    assert payloads in ([b"before", b"after"], [b"before", b"late", b"after"])


def is_published(producer: danube_fast.Producer, payload: bytes) -> bool:
    """Publish once; errors that tell of an earlier message do not count."""
    try:
        producer.publish(payload)
    except DeadlineExceeded:
        return False
    return True


def test_a_client_that_is_closed_ends_the_calls_of_its_threads(
    server: Server, transport: Any
) -> None:
    name = f"/default/closed-{transport}"
    with server.client(transport=transport) as client:
        producers = [client.producer(f"{name}-{number}") for number in range(4)]
        for producer in producers:
            producer.publish(b"x")
        consumers = [client.consumer(f"{name}-{n}", subscription="s") for n in range(2)]

        def body(number: int) -> Any:
            if number < len(producers):
                return producers[number].publish(b"y")
            return consumers[number - len(producers)].receive()

        with stopped(server):
            team = Team(len(producers) + len(consumers), body)
            wait_until("all threads' waits", lambda: waiting(client) == 6)
            with contextlib.suppress(DanubeError):
                client.close(timeout=0.5)
            outcomes = team.join(SOON_SECONDS)
    wrong = {n: outcome for n, outcome in outcomes.items() if not isinstance(outcome, DanubeError)}
    assert not wrong, f"no DanubeError: {wrong}"


HEAD = """
import os, sys, threading, time, danube_fast
url, topic, receives, transport = *sys.argv[1:3], sys.argv[3] == "receive", sys.argv[4]
client = danube_fast.connect(url, transport=transport, timeout=60)
producer = client.producer(topic)
consumer = client.consumer(topic, subscription="s", initial_position="earliest")
producer.publish(b"before")
message = consumer.receive(timeout=60)
consumer.ack(message)
consumer.flush_acks(timeout=60)

def say(word):
    print(word, flush=True)

def call(payload):
    return consumer.receive() if receives else producer.publish(payload)

def tell_when_inside():
    while not client._core.pump._asleep:
        time.sleep(0.01)
    say("inside")

def wait_for(word):
    assert sys.stdin.readline().strip() == word
"""

INTERRUPTED = """
say("ready")
wait_for("stopped")
threading.Thread(target=tell_when_inside, daemon=True).start()
try:
    call(b"interrupted")
except KeyboardInterrupt:
    say("interrupted")
wait_for("continued")
say(producer.publish(b"after").offset)
wanted = {b"after"} if receives else {b"interrupted", b"after"}
while wanted:
    message = consumer.receive(timeout=60)
    wanted.remove(message.payload)
    consumer.ack(message)
client.close(timeout=60)
say("end")
"""


@pytest.mark.parametrize("call", ["publish", "receive"])
def test_an_interrupt_ends_a_wait_and_the_client_goes_on(
    server: Server, transport: Any, call: str
) -> None:
    topic = f"/default/interrupted-{transport}-{call}"
    with script(HEAD + INTERRUPTED, server.url, topic, call, transport) as inside:
        inside.hear("ready")
        with stopped(server):
            inside.tell("stopped")
            inside.hear("inside")
            inside.process.send_signal(signal.SIGINT)
            inside.hear("interrupted", SOON_SECONDS)
        inside.tell("continued")
        between = [b"interrupted"] if call == "publish" else []
        inside.hear(str(1 + len(between)), SOON_SECONDS)
        inside.hear("end")
        inside.ends_quietly()
    with server.client() as client:
        assert [*stored(client, topic).values()] == [b"before", *between, b"after"]


EXITS = """
say("ready")
wait_for("stopped")
for payload in (b"1", b"2"):
    threading.Thread(target=call, args=(payload,), daemon=True).start()
tell_when_inside()
"""


@pytest.mark.parametrize("call", ["publish", "receive"])
def test_an_interpreter_ends_with_threads_inside(server: Server, transport: Any, call: str) -> None:
    topic = f"/default/exits-{transport}-{call}"
    with script(HEAD + EXITS, server.url, topic, call, transport) as leaving:
        leaving.hear("ready")
        with stopped(server):
            leaving.tell("stopped")
            leaving.hear("inside")
            leaving.ends_quietly()


FORKS = """
say("ready")
wait_for("stopped")
ids = []
thread = threading.Thread(target=lambda: ids.append(producer.publish(b"parent")))
thread.start()
tell_when_inside()
pid = os.fork()
if pid == 0:
    try:
        producer.publish(b"child")
    except danube_fast.FailedPrecondition:
        pass
    with danube_fast.connect(url, transport=transport, timeout=60) as client:
        client.producer(topic, timeout=60).publish(b"child anew")
    sys.exit(0)
say("forked")
assert os.waitpid(pid, 0)[1] == 0
thread.join(60)
say(len(ids))
client.close(timeout=60)
"""


def test_a_fork_while_a_thread_waits(server: Server, transport: Any) -> None:
    topic = f"/default/forks-{transport}"
    with script(HEAD + FORKS, server.url, topic, "publish", transport) as parent:
        parent.hear("ready")
        with stopped(server):
            parent.tell("stopped")
            parent.hear("inside")
            parent.hear("forked")
        parent.hear("1")
        parent.ends_quietly()
    with server.client() as client:
        payloads = [*stored(client, topic).values()]
    assert sorted(payloads) == [b"before", b"child anew", b"parent"]


STRUCK = """
import collections, random, signal
draw, may_raise, acked, strikes, number, longest = random.Random(1), False, [], 0, 0, 0.0
kept = 0
lane = producer._publisher.lanes[0]

def on_alarm(*_):
    global may_raise
    if may_raise:
        may_raise = False
        raise KeyboardInterrupt

def is_lost(kind, trace):
    # in a destructor of pyzmq, which says so
    return kind is KeyboardInterrupt and "zmq/" in trace.tb_frame.f_code.co_filename

def on_error(kind, error, trace):
    if not is_lost(kind, trace):
        sys.__excepthook__(kind, error, trace)

def on_unraisable(told):
    if not is_lost(told.exc_type, told.exc_traceback):
        sys.__unraisablehook__(told)

sys.excepthook, sys.unraisablehook = on_error, on_unraisable
signal.signal(signal.SIGALRM, on_alarm)
while strikes < 200:
    number, began = number + 1, time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 3e-4))
    may_raise = True
    try:
        producer.publish(b"%d" % number)
        may_raise = False
        acked.append(b"%d" % number)
    except KeyboardInterrupt:
        strikes += 1
        kept += client._core.pump.lock._is_owned()
    while lane.unacked or not lane.connection.free_row:
        producer.flush(timeout=60)
    longest = max(longest, time.monotonic() - began)
say("in time" if longest < 15 else f"{longest} s for one message")
rows = client._core.pump.answers._words[0]
say("free" if not kept else f"the lock was kept after {kept} strikes")
say("few rows" if rows < 20 else f"{rows} rows")
with client.reader(topic, start="earliest", stop="latest") as reader:
    counts = collections.Counter(message.payload for batch in reader.batches() for message in batch)
lost = [each for each in acked if not counts[each]]
twice = [each for each, count in counts.items() if count > 1]
say(f"lost {lost}, twice {twice}")
client.close(timeout=60)
"""


def test_an_interrupt_at_any_moment_leaves_nothing_half_done(
    server: Server, transport: Any
) -> None:
    """Timers strike anywhere inside publish(): a message that was half sent, or half acked, is sent again at once."""
    topic = f"/default/struck-{transport}"
    with script(HEAD + STRUCK, server.url, topic, "publish", transport) as struck:
        for word in ("in time", "free", "few rows", "lost [], twice []"):
            struck.hear(word, 2 * SECONDS)
        struck.ends_quietly()
