"""Sign-ons that are known only to the coordinator and the process of sign-on, when both are killed: they are forgotten there,
and clients that still have what they signed on with come in again by themselves.

What it measures is printed: see docs/security.md.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import danube_fast
from tests.delivery.sign_on_rig import SignOnServer
from tests.delivery.test_security import TOPIC
from tests.delivery.test_sign_on_clients import Load, api_key, way_in

KILLS = 3
BACK_SECONDS = 30.0
PAIR = "coordinator", "sign_on"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SignOnServer]:
    with SignOnServer(tmp_path / "data", tmp_path) as broker:
        broker.make_ann()
        with broker.come_in("ann") as ann:
            ann.admin.create_namespace("shop")
            ann.admin.create_topic(TOPIC)
            broker.add(ann.admin, "pia", ("producer", TOPIC), ("consumer", TOPIC))
        yield broker


def test_who_is_forgotten_signs_on_anew(server: SignOnServer) -> None:
    text, _ = api_key(server)

    def connect(name: str) -> Any:
        return danube_fast.connect(**way_in(server, lambda: text, name=name))

    took = []
    with connect("quiet") as quiet, Load(connect) as load:
        load.goes_on()
        for number in range(KILLS):
            pids = server.pids()
            began = time.monotonic()
            for role in PAIR:
                os.kill(pids[role], signal.SIGKILL)
            # asks the coordinator where the topic is, which takes a sign-on that it knows
            quiet.producer(TOPIC, name=f"p{number}", timeout=BACK_SECONDS).close()
            took.append(time.monotonic() - began)
            assert load.goes_on() < BACK_SECONDS
            after = server.pids()
            assert all(after[role] != pids[role] for role in PAIR), "they were not killed together"
    load.check()
    print(f"\nsigned on anew after {', '.join(f'{each:.1f}' for each in took)} s")
    assert max(took) < BACK_SECONDS
