"""Interrupts inside calls that send: a message goes once, whatever was done."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import pytest

from danube_fast.client.link.answers import Answers
from danube_fast.client.link.bundler import Bundler
from danube_fast.client.link.pump import Pump
from danube_fast.client.produce import straight
from danube_fast.client.produce.lane import Lane
from danube_fast.client.produce.state import ProducerState
from danube_fast.client.produce.straight import StraightWay
from tests.crash.rig import Server
from tests.shm.test_straight import SOON_SECONDS, server, stored, transport

__all__ = ["server", "transport"]


def strike(
    server: Server, transport: Any, owner: Any, name: str, *, is_done: bool, **fields: Any
) -> None:
    """Interrupt a publish with these fields once, before or behind one of its steps; it must go once, and the next one
    soon."""
    topic = f"/default/struck-{secrets.token_hex(8)}"
    original, strikes = getattr(owner, name), [1]

    def struck(*arguments: Any) -> Any:
        result = original(*arguments) if is_done or not strikes else None
        if strikes:
            strikes.pop()
            raise KeyboardInterrupt
        return result

    with server.client(transport=transport) as client:
        producer = client.producer(topic)
        assert producer.publish(b"same").offset == 0
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, struck)
            with pytest.raises(KeyboardInterrupt):
                producer.publish(b"same", **fields)
        began = time.monotonic()
        assert producer.publish(b"after").offset == 2
        assert time.monotonic() - began < SOON_SECONDS
        assert [*stored(client, topic).values()] == [b"same", b"same", b"after"]


@pytest.mark.parametrize("fields", [{}, {"key": "k"}], ids=["plain", "key"])
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (straight, "_send"),
        (Pump, "await_answer"),
        (straight, "take_ack"),
        (Answers, "take"),
        (Bundler, "settle_one"),
    ],
)
def test_an_interrupt_between_two_steps_of_a_publish(
    server: Server, transport: Any, owner: Any, name: str, is_done: bool, fields: dict[str, Any]
) -> None:
    """Whatever was done, a frame that is on its way, or was acked, is not waited for in vain."""
    strike(server, transport, owner, name, is_done=is_done, **fields)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"), [(Lane, "pack"), (ProducerState, "sent"), (Lane, "_transmit")]
)
def test_an_interrupt_while_the_open_batch_is_packed(
    server: Server,
    transport: Any,
    owner: type,
    name: str,
    is_done: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that takes the way of all others, as one beside others does, goes once too."""
    monkeypatch.setattr(StraightWay, "publish_columns", lambda *_: None)
    strike(server, transport, owner, name, is_done=is_done, key="k")


def test_an_interrupt_behind_a_callback_leaves_the_lock_as_it_was(
    server: Server, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, strikes, told = Pump._own_again, [1], list[Any]()
    main = threading.get_ident()

    def struck(pump: Pump) -> None:
        # a thread of timers may call back too
        if strikes and pump._caller == main:
            strikes.pop()
            raise KeyboardInterrupt
        original(pump)

    with server.client(transport=transport) as client:
        producer = client.producer(f"/default/called-back-{transport}")
        monkeypatch.setattr(Pump, "_own_again", struck)

        def tell_all() -> None:
            while True:
                producer.send(b"told", on_delivery=lambda *outcome: told.append(outcome))
                producer.flush()

        with pytest.raises(KeyboardInterrupt):
            tell_all()
        assert told and not strikes
        assert producer.publish(b"after").offset == len(told)
