"""How soon a worker feels that rights have changed: while it is busy, stopped, restarted, or the coordinator is dead.

The figures are printed (`pytest -s`). The promise is 2 s for rights and 5 s for keys that end or are revoked; a machine that
other work keeps busy may take longer before the test fails, not before the figure says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import DanubeError, PermissionDenied, Unavailable
from tests.delivery.test_security import SecuredServer
from tests.delivery.test_security_matrix import ERROR, OPEN_PRODUCER, RESULT, KeyedWire
from tests.delivery.test_security_matrix import KeyedClient as Raw
from tests.workers.broker import ROOT, wait_until

TOPIC = "/shop/orders"
RIGHTS_SECONDS, KEYS_SECONDS = 2.0, 5.0
SLACK = 3
"""So many times the promise fails the test: two cores run brokers, clients and other tests."""
STOP_SECONDS = 4.0
"""Far below the time after which the supervisor kills a process that does not beat."""
BUSY_MIN = 0.3
"""Share of the time in which the loop of a busy worker runs, or waits for a core."""
PUBLISHERS = 3
_PUBLISHER = """
import sys, danube_fast
url, key, path, topic = sys.argv[1:]
with danube_fast.connect(url, server_key=key, key_file=path, transport="tcp") as client:
    producer = client.producer(topic)
    payloads = [b"x" * 100] * 2000
    print("ready", flush=True)
    while True:
        producer.send_many(payloads)
"""


class Stage:
    """A secured broker with one topic on one worker, and pia, who publishes and consumes there."""

    def __init__(self, server: SecuredServer, ann: Any) -> None:
        self.server, self.ann = server, ann
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC, dispatch="non_reliable")
        server.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
        server.add(ann.admin, "load", ("producer", TOPIC))
        self.worker_index = int(ann.admin.describe_topic(TOPIC)["placement"][0]["worker"])

    @property
    def worker_pid(self) -> int:
        """Process of the topic's worker, as it is now."""
        rows = self.ann.admin.cluster_status()["processes"]
        (row,) = [each for each in rows if each["process"] == f"worker-{self.worker_index}"]
        return int(row["pid"])

    @property
    def coordinator_pid(self) -> int:
        """Process of the coordinator, as it is now."""
        return int(self.ann.admin.cluster_status()["processes"][0]["pid"])

    def revoke(self) -> None:
        """Take pia's rights away."""
        for number in (0, 1):
            self.ann.admin.delete_security("binding", f"pia-{number}")

    def grant(self) -> None:
        """Give them back."""
        self.ann.admin.set_binding("pia-0", "user:pia", "producer", TOPIC)
        self.ann.admin.set_binding("pia-1", "user:pia", "consumer", TOPIC)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("staleness")
    with SecuredServer(folder / "data", folder) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            yield Stage(server, ann)


class Watcher:
    """A client of pia that publishes and consumes, and notes when it was refused first."""

    def __init__(self, stage: Stage) -> None:
        self.client = stage.server.come_in("pia")
        self.producer = self.client.producer(TOPIC)
        self.producer.publish(b"in")
        self.consumer = self.client.consumer(TOPIC, subscription="s", initial_position="latest")
        self.refused: dict[str, float] = {}
        self.last_taken = 0.0
        self._ends = threading.Event()
        calls = (("publish", self._publish), ("consume", self._consume))
        self._threads = [threading.Thread(target=self._run, args=each, daemon=True) for each in calls]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def _publish(self) -> None:
        self.producer.publish(b"more")
        self.last_taken = time.monotonic()

    def _consume(self) -> None:
        self.consumer.receive_batch(timeout=0.05)

    def _run(self, name: str, call: Callable[[], None]) -> None:
        while not self._ends.is_set():
            try:
                call()
            except PermissionDenied:
                self.refused[name] = time.monotonic()
                return
            except DanubeError:  # the worker is away
                time.sleep(0.005)

    def seconds_from(self, began: float, bound: float) -> float:
        """How long until both were refused, and the last publish was taken before that."""
        wait_until("the refusal of both", lambda: len(self.refused) == 2, SLACK * bound + 30)
        return max(*self.refused.values(), self.last_taken) - began

    def close(self) -> None:
        """End it."""
        self._ends.set()
        for thread in self._threads:
            thread.join(30)
        self.client.close()


@pytest.fixture
def watcher(stage: Stage) -> Iterator[Watcher]:
    stage.grant()
    made: list[Watcher] = []

    def is_made() -> bool:
        try:
            made.append(Watcher(stage))
        except DanubeError:  # the rights have not arrived
            return False
        return True

    wait_until("a client that publishes and consumes", is_made)
    yield made[0]
    made[0].close()


def report(what: str, seconds: float, bound: float) -> None:
    """Print a figure, and fail if it is far above what is promised."""
    verdict = "" if seconds <= bound else f" (more than the {bound:g} s that are promised)"
    print(f"\nrights: {what}: felt after {seconds:.3f} s{verdict}")
    assert seconds < SLACK * bound, f"{what}: {seconds:.3f} s"


def loop_seconds(pid: int) -> float:
    """Time that a process's loop has run, or has waited for a core."""
    running_ns, waiting_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return (int(running_ns) + int(waiting_ns)) / 1e9


@contextlib.contextmanager
def load_on(stage: Stage) -> Iterator[None]:
    """Processes that publish as fast as they can."""
    server = stage.server
    arguments = (server.url, server.server_key, str(server.folder / "load.key"), TOPIC)
    command = [sys.executable, "-c", _PUBLISHER, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        for _ in range(PUBLISHERS)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=30)


def test_idle(stage: Stage, watcher: Watcher) -> None:
    stage.revoke()
    report("a worker with one client", watcher.seconds_from(time.monotonic(), 2), RIGHTS_SECONDS)


def test_busy_in_its_loop(stage: Stage, watcher: Watcher) -> None:
    pid = stage.worker_pid
    with load_on(stage):
        used, began = loop_seconds(pid), time.monotonic()
        wait_until("a second under load", lambda: time.monotonic() - began > 1)
        busy = (loop_seconds(pid) - used) / (time.monotonic() - began)
        stage.revoke()
        seconds = watcher.seconds_from(time.monotonic(), RIGHTS_SECONDS)
    assert busy > BUSY_MIN, f"the loop was busy for {busy:.0%} of the time"
    report(f"a worker whose loop is busy for {busy:.0%} of the time", seconds, RIGHTS_SECONDS)


def test_stopped_and_continued(stage: Stage, watcher: Watcher) -> None:
    pid = stage.worker_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        stage.revoke()
        stopped = time.monotonic()
        wait_until("the end of the stop", lambda: time.monotonic() - stopped > STOP_SECONDS)
    finally:
        os.kill(pid, signal.SIGCONT)
    continued = time.monotonic()
    seconds = watcher.seconds_from(continued, RIGHTS_SECONDS)
    report("a worker that was stopped, from its SIGCONT on", seconds, RIGHTS_SECONDS)
    assert stage.worker_pid == pid, "it was restarted, not continued"


def test_a_worker_that_was_stopped_opens_nothing_before_it_has_heard(stage: Stage) -> None:
    """Its coordinator is stopped when it goes on: so it hears nothing, and knows the old rights only."""
    stage.grant()
    place = stage.ann.admin.describe_topic(TOPIC)["placement"][0]["partition_id"]
    pid, coordinator = stage.worker_pid, stage.coordinator_pid
    shop: Any = stage
    wire = KeyedWire(shop, worker_port(stage), "pia")
    try:
        raw = Raw(wire)  # type: ignore[arg-type]
        assert raw.ask(OPEN_PRODUCER, place, "before")[0] == RESULT
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        wait_until("a pause", lambda: time.monotonic() - began > 2.5)
        request = raw.post(OPEN_PRODUCER, place, "at once")
        os.kill(coordinator, signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)
        for name in ("at once", "later"):
            reply = raw.answer(request)
            assert reply[0] == ERROR and reply[2] == Unavailable.code, (name, reply)
            request = raw.post(OPEN_PRODUCER, place, "later")
        os.kill(coordinator, signal.SIGCONT)
        raw.answer(request)

        def is_open() -> bool:
            return bool(raw.ask(OPEN_PRODUCER, place, "again")[0] == RESULT)

        continued = time.monotonic()
        wait_until("a handle, now that it has heard", is_open)
        print(f"\nrights: heard after a stop within {time.monotonic() - continued:.3f} s")
    finally:
        for each in (coordinator, pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)
        wire.close()


def worker_port(stage: Stage) -> int:
    """Port of the topic's worker."""
    return stage.server.port + 2 + stage.worker_index


def test_restarted_meanwhile(stage: Stage, watcher: Watcher) -> None:
    pid = stage.worker_pid
    os.kill(pid, signal.SIGKILL)
    stage.revoke()
    revoked = time.monotonic()
    wait_until("the refusal of both", lambda: len(watcher.refused) == 2)
    taken_late = max(0.0, watcher.last_taken - revoked)
    report("a worker that was killed before the change: last publish taken", taken_late, RIGHTS_SECONDS)  # fmt: skip
    assert taken_late == 0.0, "a worker served a client before it knew all records"
    wait_until("the new worker", lambda: stage.worker_pid != pid)


def test_the_coordinator_dead(stage: Stage, watcher: Watcher) -> None:
    coordinator = stage.coordinator_pid
    stage.revoke()
    os.kill(coordinator, signal.SIGKILL)
    began = time.monotonic()
    seconds = watcher.seconds_from(began, RIGHTS_SECONDS)
    taken = max(0.0, watcher.last_taken - began)
    print(f"\nrights: the last publish was taken {taken:.3f} s behind the coordinator's end")
    report("the coordinator killed behind the change", seconds, RIGHTS_SECONDS)
    wait_until("the new coordinator", lambda: is_back(stage, coordinator))


def is_back(stage: Stage, pid: int) -> bool:
    """Whether there is another coordinator."""
    try:
        return stage.coordinator_pid != pid
    except DanubeError:
        return False


@pytest.mark.parametrize("how", ["expired", "revoked"])
@pytest.mark.parametrize("state", ["idle", "busy", "stopped", "coordinator dead"])
def test_a_key_that_ends(stage: Stage, how: str, state: str) -> None:
    """The session ends, wherever its worker is then; an expired key ends without the coordinator's word."""
    if (how, state) == ("revoked", "coordinator dead"):
        state = "coordinator killed behind the change"
    server, ann, user = stage.server, stage.ann, f"kay-{how}-{state.replace(' ', '-')}"
    server.add(ann.admin, user, ("producer", TOPIC))
    credential = f"curve:{server.keys[user]}"
    client = server.come_in(user, timeout=5.0)
    producer = client.producer(TOPIC)
    producer.publish(b"in")
    worker, coordinator = stage.worker_pid, stage.coordinator_pid

    def is_out() -> bool:
        try:
            producer.publish(b"more")
        except PermissionDenied:
            return True
        except DanubeError:
            return False
        return False

    with contextlib.ExitStack() as stack:
        if state == "busy":
            stack.enter_context(load_on(stage))
        if how == "expired":
            ann.admin.set_credential(credential, user, expires_seconds=2)
            due = time.monotonic() + 2
        if state == "stopped":
            os.kill(worker, signal.SIGSTOP)
            stack.callback(os.kill, worker, signal.SIGCONT)
        if state == "coordinator dead":
            os.kill(coordinator, signal.SIGSTOP)
            stack.callback(os.kill, coordinator, signal.SIGCONT)
        if how == "revoked":
            ann.admin.delete_security("credential", credential)
            due = time.monotonic()
        if state == "coordinator killed behind the change":
            os.kill(coordinator, signal.SIGKILL)
        if state == "stopped":
            wait_until("the end of the stop", lambda: time.monotonic() - due > 1)
            os.kill(worker, signal.SIGCONT)
            due = time.monotonic()
        wait_until("the end of the session", is_out, SLACK * KEYS_SECONDS + 30)
        seconds = time.monotonic() - due
    client.close()
    report(f"a key that is {how}, {state}", seconds, KEYS_SECONDS)
    if "dead" in state or "killed" in state:
        wait_until("a coordinator", lambda: is_back(stage, 0))
    ann.admin.delete_security("principal", user)
