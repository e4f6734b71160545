"""A client that is refused for the moment, and asks again, says after a while why it waits."""

from __future__ import annotations

from typing import Any

import pytest

import danube_fast
from danube_fast.net import protocol as p

TOPIC = "/default/t"
TEXT = "the authorizer gate could not decide; try again"
REFUSALS = 4


@pytest.mark.parametrize("kind", ["lookup", "producer", "consumer"])
def test_an_open_that_is_refused_for_a_while_says_why(
    broker: Any,
    client: danube_fast.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    name = {"lookup": "_on_lookup", "producer": "_on_openproducer", "consumer": "_on_subscribe"}[
        kind
    ]
    serve, refused = getattr(broker, name), list[Any]()

    def refuse(session: Any, identity: bytes, command: Any) -> None:
        if len(refused) < REFUSALS:
            refused.append(command)
            broker.reply(identity, p.Error(command.request, danube_fast.Unavailable.code, TEXT))
        else:
            serve(session, identity, command)

    def open_one() -> None:
        if kind != "consumer":
            client.producer(TOPIC).close()
        else:
            client.consumer(TOPIC, subscription="s").close()

    client.producer(TOPIC).close()
    setattr(broker, name, refuse)
    open_one()
    assert not caplog.records, "a short wait is told"
    refused.clear()
    monkeypatch.setattr("danube_fast.client.link.calls.WAIT_TOLD_NS", 1)
    open_one()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"{TOPIC} is asked for again and again: {TEXT}"
    assert len(refused) == REFUSALS
