"""Gaps, and what cannot be read, are told between the messages before and behind them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import zmq

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.consumer import Gap
from danube_fast.errors import DataLoss
from tests.workers.shard_rig import Rig

DELIVER, EVENT = 69, 70


@pytest.mark.parametrize("ends", [False, True], ids=["gap", "fault"])
def test_messages_go_out_before_the_gap_behind_them(
    rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    rig = rigs()
    rig.assign(1, durability="memory")
    client = rig.client()
    opened = client.open_producer(1)
    for number in range(5):
        assert client.publish((1, client.frame(opened, number, [b"x"])))[0] == 0
    fetch = Partition.fetch

    def lossy(partition: Partition, read_log: Any, sub: Any, offset: int) -> Any:
        if offset != 2:
            return fetch(partition, read_log, sub, offset)
        if ends:
            raise DataLoss("damaged")
        return Gap(3, "gone", lost=True)

    monkeypatch.setattr(Partition, "fetch", lossy)
    consumer = rig.client()
    arrived: list[int] = []
    consumer.subscribe(1)

    def take() -> bool:
        try:
            parts = consumer.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        arrived.append(msgpack.unpackb(parts[0], strict_map_key=False)[0])
        return EVENT in arrived

    rig.turn(take, "the event")
    if not ends:
        rig.turn(lambda: take() and arrived[-1] == DELIVER, "the messages behind the gap")
    told = [kind for kind, _ in itertools.groupby(arrived) if kind in (DELIVER, EVENT)]
    assert told == ([DELIVER, EVENT] if ends else [DELIVER, EVENT, DELIVER])
