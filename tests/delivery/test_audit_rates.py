"""A bound on the administrative changes of a user, so that it cannot push what others did out of the audit log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.errors import ResourceExhausted
from tests.delivery.audit_rig import AuditedServer

RATE = 5
BURST = 50


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AuditedServer]:
    changes = {"admin_changes_per_second_max": RATE}
    with AuditedServer(tmp_path / "data", tmp_path, **changes) as audited:
        audited.make_ann()
        yield audited


def test_a_user_makes_so_many_changes_and_none_goes_unrecorded(server: AuditedServer) -> None:
    with server.come_in("ann") as ann:
        for number in range(2 * BURST):
            ann.admin.set_role(f"role-{number}", ["lookup"])
        ann.admin.create_namespace("shop")
        server.add(ann.admin, "pia", ("operator", "namespace:shop"), ("producer", "namespace:shop"))
        with server.come_in("pia") as pia:
            made, refusals = 0, list[str]()
            began = time.monotonic()
            for number in range(4 * BURST):
                try:
                    pia.admin.create_topic(f"/shop/t{number}")
                    made += 1
                except ResourceExhausted as error:
                    refusals.append(str(error))
            most = BURST + 1 + (time.monotonic() - began) * RATE
            assert BURST <= made <= most
            assert refusals and "admin_changes_per_second_max" in refusals[0]
            assert len(pia.admin.list_topics("shop")) == made, "reads are not counted"
            # a publish that makes a topic is a change too: its client waits for room
            began = time.monotonic()
            for number in range(RATE):
                pia.producer(f"/shop/by-publish-{number}", timeout=30.0).publish(b"one")
            assert time.monotonic() - began >= (RATE - 1) / RATE / 2
            ann.admin.create_topic("/shop/by-ann")
            topics = {row["topic"] for row in ann.admin.list_topics("shop")}
        assert len(topics) == made + RATE + 1
    begun = {each["resource"] for each in server.records(event="begin", action="create_topic")}
    assert begun == topics
    line = server.wait_for(event="denied", principal="pia", outcome="ResourceExhausted")
    assert line["action"] == "create_topic"
    assert len(server.records(event="denied", principal="pia")) < 8
