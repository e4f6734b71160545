"""`danube_fast.testing.Broker` and the pytest fixtures."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.testing import Broker

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 60.0


def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {WAIT_SECONDS} s"
        time.sleep(0.01)
    return value


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def processes_of(broker: Broker) -> list[int]:
    children = Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()
    return [broker.pid, *map(int, children)]


def test_from_the_constructor_to_stop() -> None:
    broker = Broker()
    folder, pids = broker.data_dir.parent, processes_of(broker)
    assert len(pids) == 4 and broker.worker_pids == pids[3:] and broker.url in repr(broker)
    with urllib.request.urlopen(f"{broker.admin_url}/healthz", timeout=60) as answer:
        assert answer.status == 200
    with broker.client(name="me") as client:
        assert client.name == "me"
        client.publish("/default/t", b"x")
    broker.stop()
    broker.stop()
    assert not folder.exists() and not any(map(is_running, pids))
    with pytest.raises(danube_fast.FailedPrecondition, match="make another"):
        broker.restart()


def test_it_comes_back_at_its_address_with_its_data(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path / "data", workers=2) as broker:
        url = broker.url
        with broker.client() as client, client.producer("/default/t") as producer:
            producer.publish(b"one")
            broker.restart()
            producer.publish(b"two")
            broker.kill()
            with pytest.raises(danube_fast.Unavailable):
                danube_fast.connect(url, timeout=0.3)
            broker.start()
            producer.publish(b"three")
            with pytest.raises(danube_fast.FailedPrecondition, match="running"):
                broker.start()
            old = broker.kill_worker(1)
            until("the next worker", lambda: old not in broker.worker_pids)
            assert [m.payload for m in client.reader("/default/t")] == [b"one", b"two", b"three"]
            assert broker.url == url
    assert (tmp_path / "data").is_dir()
    with Broker(data_dir=tmp_path / "data") as broker, broker.client() as client:
        assert len(list(client.reader("/default/t"))) == 3


def test_several_beside_each_other_and_from_threads() -> None:
    brokers: list[Broker] = []
    threads = [threading.Thread(target=lambda: brokers.append(Broker())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    try:
        assert len({broker.url for broker in brokers}) == 3
        for broker in brokers:  # the threads that started them have ended
            with broker.client() as client:
                client.publish("/default/t", b"x")
    finally:
        for broker in brokers:
            broker.stop()


def test_from_an_event_loop() -> None:
    async def main(broker: Broker) -> None:
        async with await broker.async_client() as client:
            await client.publish("/default/t", b"x")

    with Broker() as broker:
        asyncio.run(main(broker))


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(danube_fast.InvalidArgument, match="segment_bytes"):
        Broker(segmnet_bytes=1)
    with pytest.raises(danube_fast.FailedPrecondition, match="chooses its ports"):
        Broker(listen="127.0.0.1:6650")
    with pytest.raises(danube_fast.InvalidArgument, match="1 to 14"):
        Broker(workers=99)
    with pytest.raises(danube_fast.InvalidArgument, match="whole number"):
        Broker(workers="x")
    data = tmp_path / "data"
    with (
        Broker(data_dir=data),
        pytest.raises(danube_fast.Internal, match=r"did not start.*in use"),
    ):
        Broker(data_dir=data)


ORPHAN = """
import os, signal, sys
from danube_fast.testing import Broker
broker = Broker()
print(broker.pid, *broker.worker_pids, broker.data_dir.parent, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "sys.exit()", "raise ValueError"],
)
def test_it_ends_with_the_process_that_started_it(end: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", ORPHAN.format(end=end)], env=environment, capture_output=True,
        text=True, timeout=180, check=False,
    )  # fmt: skip
    *pids, folder = result.stdout.split()
    assert len(pids) == 2, result.stderr
    until("the end of all", lambda: not any(is_running(int(pid)) for pid in pids))
    until("the end of the folder", lambda: not Path(folder).exists())


TESTS = """
import pytest

SEEN = []

def test_one(danube_broker, danube_topic):
    with danube_broker.client() as client:
        client.publish(danube_topic, b"x")
        SEEN.append((danube_broker.pid, danube_topic))

def test_two(danube_broker, danube_topic, danube_namespace):
    assert danube_topic.startswith(danube_namespace + "/")
    (pid, topic), = SEEN
    with danube_broker.client() as client:
        assert pid == danube_broker.pid and topic != danube_topic
        assert client.admin.list_topics() == []
        assert {n["namespace"] for n in client.admin.list_namespaces()} == {
            "default", "system", danube_namespace[1:]}

def test_pids(danube_broker):
    print("PID", danube_broker.pid)
"""


def pytest_run(tmp_path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_them.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "danube_fast.testing.plugin", "-p",
            "no:cacheprovider", "-W", "error", "-s", *options, "test_them.py",
        ],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


def test_the_fixtures(tmp_path: Path) -> None:
    result = pytest_run(tmp_path, TESTS)
    assert result.returncode == 0 and "3 passed" in result.stdout, result.stdout + result.stderr
    pid = int(result.stdout.partition("PID ")[2].split()[0])
    until("the end of the broker", lambda: not is_running(pid))


def test_a_run_without_them_loads_nothing_of_ours(tmp_path: Path) -> None:
    text = "import sys\n\ndef test_nothing():\n    print(sorted(m for m in sys.modules if 'danube' in m or m in ('numba', 'zmq', 'numpy')))\n"
    result = pytest_run(tmp_path, text)
    assert result.returncode == 0, result.stdout + result.stderr
    expected = "['danube_fast', 'danube_fast.testing', 'danube_fast.testing.plugin', 'danube_fast.version']"
    assert expected in result.stdout


def test_pytest_finds_them_by_itself() -> None:
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    name = "danube_fast.testing.plugin"
    assert entry_points["pytest11"] == {name: name}


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    text = (
        TESTS
        + "\ndef test_waits(danube_broker):\n    import time\n    print('WAITING', flush=True)\n    time.sleep(60)\n"
    )
    (tmp_path / "test_them.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "danube_fast.testing.plugin", "-s", "-p"]
    process = subprocess.Popen(
        [*command, "no:cacheprovider", "test_them.py"], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    pid = 0
    for line in process.stdout:
        if "PID" in line:
            pid = int(line.partition("PID ")[2])
        if "WAITING" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    assert pid
    until("the end of the broker", lambda: not is_running(pid))
