"""What `status`, `doctor` and metrics say of a process that does without something, and of the ports in use."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from danube_fast.admin.faults import threads_text
from danube_fast.cli.doctor import _process as finding_of
from danube_fast.cli.host import Verdict
from danube_fast.ring.counters import Counter
from danube_fast.ring.handover import address_beside
from danube_fast.workers.supervisor.datadir import DataDirectory
from tests.workers.broker import Broker, wait_until


@pytest.fixture
def token(tmp_path: Path) -> str:
    """Part of the names of the broker that has its data below `data`."""
    directory = DataDirectory.open(str(tmp_path / "data"))
    found = directory.token
    directory.close()
    return found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def take(address: str | bytes) -> socket.socket:
    """Hold a name, as any user of the host may."""
    taken = socket.socket(socket.AF_UNIX)
    taken.bind(address)
    return taken


def faults(broker: Broker) -> dict[str, str]:
    return {row["process"]: row["fault"] for row in broker.status()["processes"]}


def metric(broker: Broker, name: str, process: str) -> float:
    with urllib.request.urlopen(f"{broker.ready['admin']}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    front = f'danube_fast_{name}{{process="{process}"}} '
    (line,) = [line for line in lines if line.startswith(front)]
    return float(line.removeprefix(front))


def test_names_that_another_process_has_are_told_until_they_are_free(
    tmp_path: Path, token: str, stack: ExitStack
) -> None:
    first, second = (f"danube-{token}-{name}" for name in ("worker0", "worker1"))
    rings = address_beside(f"ipc://@{first}")
    held = stack.enter_context(ExitStack())
    for name in (f"\0{first}", rings, f"\0danube-{token}-coordinator"):
        held.enter_context(take(name))
    stack.enter_context(take(f"\0{second}"))
    broker = stack.enter_context(Broker(tmp_path / "data", fake="", workers=2))
    broker.wait_ready()

    def told() -> dict[str, str]:
        found = faults(broker)
        return found if all(found.values()) else {}

    found = wait_until("the faults of all three", told)
    both = f"names @{first} and @{rings[1:].decode()}, so worker-0 has no ipc and no shared memory"
    assert both in found["worker-0"] and "worker-0 takes the names again" in found["worker-0"]
    assert f"name @{second}, so worker-1 has no ipc, and" in found["worker-1"]
    assert f"name @danube-{token}-coordinator, so coordinator has no ipc, and" in found["coordinator"]  # fmt: skip
    seen = [
        metric(broker, name, f"worker-{n}") for n in (0, 1) for name in ("ipc_taken", "rings_taken")
    ]
    assert seen == [1, 1, 1, 0]
    held.close()

    def is_mended() -> bool:
        now = faults(broker)
        return not now["worker-0"] and not now["coordinator"] and bool(now["worker-1"])

    wait_until("the names that are free, taken again", is_mended)
    assert broker.status()["counters"]["ipc_taken"] == 1
    os.kill(broker.ready["worker_pids"][1], 9)
    wait_until("its end", lambda: not faults(broker)["worker-1"])


def test_ports_in_use_are_told_where_the_system_has_chosen_them(tmp_path: Path) -> None:
    with Broker(tmp_path / "data") as broker:
        broker.wait_ready()
        status = broker.status()
    assert status["listen"] == broker.ready["url"].removeprefix("danube://")
    assert not status["listen"].endswith(":0")
    assert status["sign_on"] == ""


@pytest.mark.parametrize(
    ("component", "lost", "words"),
    [
        ("authorizer", 0, ""),
        ("authorizer", 1, "1 thread has waited for the authorizer for more than 5 s"),
        ("authenticator", 3, "3 threads have waited for the authenticator for more than 5 s"),
    ],
)
def test_threads_that_hang_are_told(component: str, lost: int, words: str) -> None:
    text = threads_text(component, {Counter.THREADS_LOST: lost})
    assert text.startswith(words) and bool(text) == bool(lost)


@pytest.mark.parametrize(
    ("row", "verdict", "advice"),
    [
        ({}, Verdict.OK, ""),
        ({"fault": ""}, Verdict.OK, ""),
        ({"fault": "end it"}, Verdict.WARNING, "end it"),
        ({"fault": "end it", "restarts": 1}, Verdict.WARNING, "end it; besides, read the broker"),
    ],
)
def test_doctor_says_what_to_do(row: dict[str, Any], verdict: Verdict, advice: str) -> None:
    found = finding_of({"process": "worker-0", "state": "ready", "pid": 7, **row})
    assert found.verdict is verdict and found.advice.startswith(advice) and bool(found.advice) == bool(advice)  # fmt: skip
