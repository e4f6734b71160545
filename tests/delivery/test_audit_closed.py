"""The audit log says what a change of rights or keys has closed: whose, from where, on what, how many."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from danube_fast.errors import DanubeError
from danube_fast.security.audit import fingerprint
from danube_fast.types import REPLY_TOPICS
from tests.delivery.audit_rig import AuditedServer
from tests.delivery.test_security import TOPIC
from tests.workers.broker import wait_until

BILLING = f"{TOPIC}#billing"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AuditedServer]:
    with AuditedServer(tmp_path / "data", tmp_path, workers=1) as audited:
        audited.make_ann()
        yield audited


def closed(server: AuditedServer) -> dict[tuple[str, str, str], int]:
    """How many were closed, by user, kind and resource; each line says from where and by which proof."""
    counts: dict[tuple[str, str, str], int] = {}
    for each in server.records(event="closed"):
        assert each["proof"] == fingerprint(f"curve:{server.keys[each['principal']]}")
        assert each["address"] == "127.0.0.1" and "outcome" not in each
        what = each["principal"], each["action"], each.get("resource", "")
        counts[what] = counts.get(what, 0) + each.get("count", 1)
    return counts


def open_all(client: Any) -> None:
    """Two producers and a consumer."""
    for name in ("left", "right"):
        client.producer(TOPIC, name=name).publish(b"one")
    client.consumer(TOPIC, subscription="billing", initial_position="earliest").receive(timeout=20)


def wait_for(server: AuditedServer, expected: dict[tuple[str, str, str], int]) -> None:
    wait_until("a line for what was closed", lambda: closed(server) == expected, 20)


def test_what_lost_its_right_is_recorded(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        for user in ("pia", "max"):
            server.add(ann.admin, user, ("producer", TOPIC), ("consumer", BILLING))
        with server.come_in("pia") as pia, server.come_in("max") as other:
            open_all(pia)
            other.producer(TOPIC, name="other").publish(b"one")
            ann.admin.delete_security("binding", "pia-1")
            wait_for(server, {("pia", "consumer", BILLING): 1})
            ann.admin.delete_security("binding", "pia-0")
            expected = {("pia", "consumer", BILLING): 1, ("pia", "producer", TOPIC): 2}
            wait_for(server, expected)
            other.producer(TOPIC, name="other").publish(b"two")
        assert closed(server) == expected, "what another user has open was counted"
        (line,) = server.records(event="closed", action="producer")
        assert line["count"] == 2, "one pass, one line"
        begun = server.records(event="begin", action="delete_security")[-1]
        assert line["seq"] > begun["seq"] and line["process"] == "worker-0"
        assert server.records(event="closed")[0] in ann.admin.list_audit(principal="pia")
        assert not [each for each in ann.admin.list_audit(denied=True) if each["event"] == "closed"]


def test_what_a_revoked_key_had_open_is_recorded(server: AuditedServer) -> None:
    """Sessions of the worker and of the coordinator, and all that they had; a reply topic is not named."""
    with server.come_in("ann") as ann:
        ann.admin.create_namespace("shop")
        ann.admin.create_topic(TOPIC)
        server.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
        with server.come_in("pia") as pia:
            open_all(pia)
            asking = threading.Thread(target=_ask, args=(pia,))
            asking.start()
            reply = _reply_topic(ann)
            assert reply.startswith(REPLY_TOPICS)
            ann.admin.delete_security("credential", f"curve:{server.keys['pia']}")
            expected = {
                ("pia", "producer", TOPIC): 3,
                ("pia", "consumer", BILLING): 1,
                ("pia", "consumer", "/system/reply-(hidden)"): 1,
                ("pia", "session", ""): 2,
            }
            wait_for(server, expected)
            asking.join(60)
        processes = {each["process"] for each in server.records(event="closed", action="session")}
        assert processes == {"worker-0", "coordinator"}
    text = server.log.read_text()
    assert reply not in text and server.keys["pia"] not in text


def _ask(client: Any) -> None:
    """Ask a question that has no answer."""
    with suppress(DanubeError):
        client.request(TOPIC, b"question", timeout=20)


def _reply_topic(client: Any) -> str:
    """Where the answer to the third message goes."""
    with client.consumer(TOPIC, subscription="watch", initial_position="earliest") as consumer:
        return str([consumer.receive(timeout=20) for _ in range(3)][-1].reply_topic)
