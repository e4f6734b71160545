"""Who sends a message without an end costs the broker a bounded amount of memory, and honest clients nothing much.

Figures are printed; bounds are several times what was measured. DANUBE_ABUSE_SECONDS makes the attacks longer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from danube_fast.net.guarded_connection import GROWTH_BYTES
from danube_fast.security.curve import new_key_pair, read_key_file
from tests.delivery.test_security import SecuredServer
from tests.protocol.attacked import Attacker, Honest, memory_watched
from tests.workers.broker import Broker, Client

SECONDS = float(os.environ.get("DANUBE_ABUSE_SECONDS", "3"))
BASE_SECONDS = 1.0
MIB = 1 << 20
STRANGER_GROWTH_MAX = 320 * MIB
"""Measured: 0 to 77 MiB. Without the guard the process grows by 350 to 500 MiB a second."""
SESSION_GROWTH_MAX = 1000 * MIB
"""Measured: 4 to 550 MiB, the most with empty parts, each of which costs 64 bytes."""
RATIO_MIN = 0.03
"""Of the honest rate, on a machine of two cores that does the attacker's work too."""
TOPIC = "/shop/orders"
LARGE_BYTES = 15 * MIB


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("abuse") / "data", fake="", workers=1) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("abuse-secured")
    with SecuredServer(folder / "data", folder, workers=1) as server:
        server.make_ann()
        with server.come_in("ann") as ann:
            server.add(ann.admin, "honest", ("producer", "/shop/*"))
            server.add(ann.admin, "member", ("viewer", "/shop/*"))
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
        yield server


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}")


def ports_of(broker: Broker) -> dict[str, tuple[int, int]]:
    """Process and tcp port of a worker and of the coordinator."""
    ready = broker.ready
    bootstrap = int(ready["url"].rpartition(":")[2])
    return {
        "worker": (ready["worker_pids"][0], ready["worker_ports"][0]),
        "coordinator": (ready["coordinator_pid"], bootstrap),
    }


@pytest.mark.parametrize("part_bytes", [0, 65536])
@pytest.mark.parametrize("who", ["stranger", "session"])
@pytest.mark.parametrize("role", ["worker", "coordinator"])
def test_a_message_without_an_end(
    broker: Broker, role: str, who: str, part_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pid, port = ports_of(broker)[role]
    with danube_fast.connect(broker.ready["url"], transport="tcp", timeout=60) as client:
        honest = Honest(client, "/default/orders")
        alone = honest.rate(BASE_SECONDS)
        with (
            memory_watched(pid) as growth,
            Attacker(
                kind="endless", port=port, seconds=SECONDS, hello=who == "session", part_bytes=part_bytes
            ) as attacker,
        ):  # fmt: skip
            beside = honest.rate(SECONDS)
            found = attacker.finish()
        honest.finish()
    say(
        capsys,
        f"{who} at the {role}, parts of {part_bytes}: grew by {growth[0] / MIB:.0f} MiB, honest ratio "
        f"{beside / alone:.2f}, {found['sent'] / MIB:.0f} MiB taken over {found['connections']} connections",
    )
    assert found["connections"] > 0
    assert growth[0] < (STRANGER_GROWTH_MAX if who == "stranger" else SESSION_GROWTH_MAX)
    assert beside > RATIO_MIN * alone
    assert not any(entry["restarts"] for entry in broker.status()["processes"])


@pytest.mark.parametrize("who", ["stranger", "session"])
def test_a_message_without_an_end_over_ipc(
    broker: Broker, who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system does not count what comes over ipc: a connection is judged by whether it sends while the process grows."""
    pid, _ = ports_of(broker)["worker"]
    with Client(broker) as asked:
        _, _, _, _, ipc = asked.lookup("/default/orders", {}).value["partitions"][0]
    if not ipc:
        pytest.skip("fewer than 16,384 descriptors: no ipc")
    with danube_fast.connect(broker.ready["url"], transport="tcp", timeout=60) as client:
        honest = Honest(client, "/default/orders")
        with (
            memory_watched(pid) as growth,
            Attacker(
                kind="endless", port=ipc.removeprefix("ipc://@"), seconds=SECONDS, hello=who == "session",
                part_bytes=65536,
            ) as attacker,
        ):  # fmt: skip
            honest.rate(SECONDS)
            found = attacker.finish()
        honest.finish()
    say(
        capsys,
        f"ipc, {who}: grew by {growth[0] / MIB:.0f} MiB, {found['sent'] / MIB:.0f} MiB taken over "
        f"{found['connections']} connections",
    )
    assert found["connections"] > 0
    assert growth[0] < SESSION_GROWTH_MAX


@pytest.mark.parametrize("who", ["unknown key", "stranger", "session"])
def test_a_message_without_an_end_over_curve(
    secured: SecuredServer, who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind a key that is registered the bound is the same; behind another one nothing passes."""
    assert secured.broker is not None
    pid, port = ports_of(secured.broker)["worker"]
    keys = new_key_pair() if who == "unknown key" else read_key_file(secured.folder / "member.key")
    with secured.come_in("honest", timeout=60.0) as client:
        honest = Honest(client, TOPIC)
        alone = honest.rate(BASE_SECONDS)
        plan: dict[str, Any] = {
            "server_key": secured.server_key, "public": keys.public, "secret": keys.secret
        }  # fmt: skip
        with (
            memory_watched(pid) as growth,
            Attacker(
                kind="endless", port=port, seconds=SECONDS, hello=who == "session", part_bytes=1000, **plan
            ) as attacker,
        ):  # fmt: skip
            beside = honest.rate(SECONDS)
            found = attacker.finish()
        honest.finish()
    say(
        capsys,
        f"curve, {who}: grew by {growth[0] / MIB:.0f} MiB, honest ratio {beside / alone:.2f}, "
        f"{found['sent'] / MIB:.0f} MiB taken over {found['connections']} connections, {found['refused']} refused",
    )
    assert growth[0] < (SESSION_GROWTH_MAX if who == "session" else STRANGER_GROWTH_MAX)
    assert beside > RATIO_MIN * alone
    assert (found["connections"] == 0) == (who == "unknown key")


def test_large_messages_are_no_attack(tmp_path: Path) -> None:
    """Messages as large as they may be, over connections that no guard may cut, while the process grows."""
    with Broker(tmp_path / "data", fake="", workers=1) as broker:
        broker.wait_ready()
        pid, _ = ports_of(broker)["worker"]
        payload = os.urandom(LARGE_BYTES)
        with memory_watched(pid) as growth, contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(
                    danube_fast.connect(broker.ready["url"], transport="tcp", timeout=60)
                )
                for _ in range(3)
            ]
            producers = [client.producer("/default/large") for client in clients]
            for _ in range(6):
                for producer in producers:
                    producer.send(payload)
                for producer in producers:
                    producer.flush(60)
        assert growth[0] > GROWTH_BYTES, "the guard had no reason to look"
        assert "were closed" not in broker.error_text()
