"""Interrupts inside calls that send: a message goes once, whatever was done."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from danube_fast.client.link.pump import Pump
from danube_fast.client.produce.lane import Lane
from danube_fast.client.produce.state import ProducerState
from tests.crash.rig import Server
from tests.shm.test_straight import SOON_SECONDS, server, stored

__all__ = ["server"]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"), [(Lane, "pack"), (ProducerState, "sent"), (Lane, "_transmit")]
)
def test_an_interrupt_while_the_open_batch_is_packed(
    server: Server, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_done: bool
) -> None:
    """A message that takes the way of all others, as one with a key, goes once too."""
    topic, original, strikes = f"/default/packed-{name}-{is_done}", getattr(owner, name), [1]

    def struck(*arguments: Any) -> Any:
        result = original(*arguments) if is_done or not strikes else None
        if strikes:
            strikes.pop()
            raise KeyboardInterrupt
        return result

    with server.client(transport="shm") as client:
        producer = client.producer(topic)
        assert producer.publish(b"same").offset == 0
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, struck)
            with pytest.raises(KeyboardInterrupt):
                producer.publish(b"same", key="k")
        began = time.monotonic()
        assert producer.publish(b"after").offset == 2
        assert time.monotonic() - began < SOON_SECONDS
        assert [*stored(client, topic).values()] == [b"same", b"same", b"after"]


def test_an_interrupt_behind_a_callback_leaves_the_lock_as_it_was(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, strikes, told = Pump._own_again, [1], list[Any]()
    main = threading.get_ident()

    def struck(pump: Pump) -> None:
        # a thread of timers may call back too
        if strikes and pump._caller == main:
            strikes.pop()
            raise KeyboardInterrupt
        original(pump)

    with server.client(transport="shm") as client:
        producer = client.producer("/default/called-back")
        monkeypatch.setattr(Pump, "_own_again", struck)

        def tell_all() -> None:
            while True:
                producer.send(b"told", on_delivery=lambda *outcome: told.append(outcome))
                producer.flush()

        with pytest.raises(KeyboardInterrupt):
            tell_all()
        assert told and not strikes
        assert producer.publish(b"after").offset == len(told)
