"""Servers that fork their workers from a master, as gunicorn does: what a worker inherits, and how it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.crash.rig import Server
from tests.shm.children import script

WORKERS = 4
MESSAGES = 20
"""Of each worker."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("prefork") / "data", workers=1) as made:
        yield made


def stored(server: Server, topic: str) -> list[bytes]:
    """All that a topic holds now, in its order."""
    with server.client() as client, client.reader(topic, start="earliest", stop="latest") as reader:
        return [message.payload for batch in reader.batches() for message in batch]


# a worker leaves the master's blocks, too, when it calls sys.exit, and says on stderr what it did not expect
HEAD = """
import gc, os, signal, sys, traceback, danube_fast
import danube_fast.client.client  # as an application that is loaded before the workers are forked

url, topic, transport = sys.argv[1:4]

def say(word):
    print(word, flush=True)

def fork(number, body):
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(120)  # the worker outlives neither the test nor a call that hangs
    code = 1
    try:
        body(number)
        code = 0
    except Exception:
        traceback.print_exc()
    if number % 2:
        os._exit(code)
    sys.exit(code)

def end_well(workers):
    for pid in workers:
        ended = os.waitpid(pid, 0)[1]
        assert ended == 0, f"a worker ended with {ended}"

def exchange(number):
    with danube_fast.connect(url, transport=transport, timeout=60) as own:
        producer = own.producer(topic)
        mirror = own.producer(f"{topic}-{number}")
        with own.consumer(f"{topic}-{number}", subscription="s") as consumer:
            for turn in range(int(sys.argv[4])):
                payload = b"worker %d %d" % (number, turn)
                producer.publish(payload)
                mirror.send(payload)
                message = consumer.receive(timeout=60)
                assert message is not None and message.payload == payload, message
                consumer.ack(message)
"""

FROM_NOTHING = """
end_well([fork(number, exchange) for number in range(int(sys.argv[5]))])
exchange(99)
say("end")
"""

FROM_A_CLIENT = """
number = 0

def go_on():
    global number
    for _ in range(10):
        producer.publish(b"master %d" % number)
        message = consumer.receive(timeout=60)
        assert message is not None and message.payload == b"master %d" % number, message
        consumer.ack(message)
        number += 1

def inherit(worker):
    calls = (
        lambda: producer.publish(b"inherited"), lambda: producer.send(b"inherited"),
        lambda: producer.send_many([b"inherited"]), producer.flush, lambda: consumer.receive(timeout=60),
        lambda: client.publish(topic, b"inherited"), lambda: client.producer(topic),
    )
    for call in calls:
        try:
            call()
        except danube_fast.FailedPrecondition as error:
            assert "forked" in str(error) and "connect() again" in str(error), error
        else:
            raise AssertionError("what was inherited was not refused")
    exchange(worker)
    if worker > 1:
        client.close()
    go = globals()
    go["client"] = go["producer"] = go["consumer"] = None
    gc.collect()

with danube_fast.connect(url, transport=transport, timeout=60) as client:
    producer = client.producer(f"{topic}-master", linger_us=1_000_000)
    with client.consumer(f"{topic}-master", subscription="s") as consumer:
        go_on()
        for payload in (b"on its way", b"in the open batch", b"in it, too"):
            producer.send(payload)
        workers = [fork(worker, inherit) for worker in range(int(sys.argv[5]))]
        for payload in (b"on its way", b"in the open batch", b"in it, too"):
            message = consumer.receive(timeout=60)
            assert message is not None and message.payload == payload, message
            consumer.ack(message)
        for _ in range(5):
            go_on()  # beside the workers
        end_well(workers)
        go_on()
        assert consumer.receive(timeout=0) is None
say("end")
"""


def run(code: str, server: Server, topic: str, transport: str) -> None:
    """Run a master of `WORKERS` workers to its end."""
    with script(HEAD + code, server.url, topic, transport, str(MESSAGES), str(WORKERS)) as master:
        master.hear("end", 120)
        master.ends_quietly()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_master_without_clients(server: Server, transport: str) -> None:
    """What is loaded before the fork, kernels among it, works in every worker and in the master."""
    topic = f"/default/nothing-{transport}"
    run(FROM_NOTHING, server, topic, transport)
    counts = Counter(stored(server, topic))
    workers = [*range(WORKERS), 99]
    assert counts == Counter(
        b"worker %d %d" % (w, turn) for w in workers for turn in range(MESSAGES)
    )


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_master_with_a_client(server: Server, transport: str) -> None:
    """Workers are refused what they inherit, work with clients of their own, and leave in every way; the master's
    session does not notice: what it had not sent when it forked is sent once, and by it."""
    topic = f"/default/client-{transport}"
    run(FROM_A_CLIENT, server, topic, transport)
    counts = Counter(stored(server, topic))
    assert counts == Counter(
        b"worker %d %d" % (w, turn) for w in range(WORKERS) for turn in range(MESSAGES)
    )
    before = [b"master %d" % number for number in range(10)]
    behind = [b"master %d" % number for number in range(10, 70)]
    between = [b"on its way", b"in the open batch", b"in it, too"]
    assert stored(server, f"{topic}-master") == [*before, *between, *behind]


KILLED = """
def publish(worker):
    if worker % 3 == 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as a worker that is told to quit
    own = danube_fast.connect(url, transport=transport, timeout=60)
    producer = own.producer(topic)
    acked = os.fdopen(pipes[worker][1], "wb", buffering=0)
    turn = 0
    while True:
        producer.publish(b"worker %d %d" % (worker, turn))
        acked.write(b"%d\\n" % turn)
        turn += 1

with danube_fast.connect(url, transport=transport, timeout=60) as client:
    producer = client.producer(topic)
    producer.publish(b"before")
    pipes, workers = [], []
    for worker in range(6):
        pipes.append(os.pipe())
        workers.append(fork(worker, publish))
        os.close(pipes[-1][1])
    for worker, pid in enumerate(workers):
        heard = b""
        with os.fdopen(pipes[worker][0], "rb", buffering=0) as acked:
            while heard.count(b"\\n") < 20:
                heard += (some := acked.read(65536))
                assert some, "a worker ended before it was told to"
            os.kill(pid, signal.SIGKILL if worker % 3 == 2 else signal.SIGTERM)
            while some := acked.read(65536):
                heard += some
        ended = os.waitpid(pid, 0)[1]
        wanted = (0, signal.SIGTERM, signal.SIGKILL)[worker % 3]
        assert ended == wanted, f"worker {worker} ended with {ended}"
        producer.publish(b"after %d" % worker)
        say(f"{heard.count(bytes([10]))}")
say("end")
"""


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_workers_that_are_killed_inside_publish(server: Server, transport: str) -> None:
    """By SIGKILL, by SIGTERM, and by SIGTERM with a handler that calls sys.exit: no ack lied, nothing is doubled,
    and master and siblings go on."""
    topic = f"/default/killed-{transport}"
    acked: list[int] = []
    with script(HEAD + KILLED, server.url, topic, transport) as master:
        for _ in range(6):
            acked.append(int(master.hear_any(120)))
        master.hear("end", 120)
        master.ends_quietly()
    found = stored(server, topic)
    others: list[Any] = [b"before", *(b"after %d" % worker for worker in range(6))]
    for worker, count in enumerate(acked):
        mine = [each for each in found if each.startswith(b"worker %d " % worker)]
        # the last one was perhaps stored, and its ack not told
        assert len(mine) in (count, count + 1)
        assert mine == [b"worker %d %d" % (worker, turn) for turn in range(len(mine))]
        others += mine
    assert Counter(found) == Counter(others)
