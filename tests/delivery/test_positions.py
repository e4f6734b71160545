"""Where subscriptions and readers begin: times, times ago, and seeks to them."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import danube_fast
from danube_fast.client.values.options import checked_position
from danube_fast.errors import InvalidArgument
from tests.crash.rig import Server

TOPIC = "/default/timed"
ROUNDS, EACH = 5, 300
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # a tail of 64 KiB: most of what is looked for stands in the log
    with Server(
        tmp_path_factory.mktemp("times") / "data", workers=1, tail_bytes_max=65_536
    ) as running:
        yield running


@pytest.mark.parametrize("durability", ["fsync", "memory"])
def test_a_time_is_the_first_message_from_then_on(server: Server, durability: str) -> None:
    topic = f"{TOPIC}-{durability}"
    moments: list[dt.datetime] = []
    with (
        danube_fast.connect(server.url) as client,
        client.producer(topic, durability=durability) as producer,
        client.consumer(topic, subscription="keeps", initial_position="earliest"),
    ):
        for number in range(ROUNDS):
            # a worker's clock is that of its turn, which may begin before the message comes
            time.sleep(0.2)
            moments.append(dt.datetime.now(dt.UTC))
            time.sleep(0.2)
            for _ in range(0, EACH, 100):
                producer.send_many([b"%d" % number + bytes(500)] * 100)
                producer.flush(timeout=WAIT_SECONDS)
        for number, moment in enumerate(moments):
            for position in (moment, moment.isoformat()):
                with client.consumer(
                    topic, subscription=f"at-{number}-{type(position).__name__}",
                    initial_position=position,
                ) as consumer:  # fmt: skip
                    first = consumer.receive(timeout=WAIT_SECONDS)
                    assert first is not None
                    assert first.offset == number * EACH, (number, position)
        with client.consumer(topic, subscription="s", initial_position="latest") as consumer:
            consumer.seek(moments[2])
            first = consumer.receive(timeout=WAIT_SECONDS)
            assert first is not None and first.offset == 2 * EACH
            consumer.seek("-1h")
            first = consumer.receive(timeout=WAIT_SECONDS)
            assert first is not None and first.offset == 0
            consumer.seek(dt.datetime.now(dt.UTC) + dt.timedelta(hours=1))
            assert consumer.receive(timeout=0.3) is None
        start = sum(1 for _ in client.reader(topic, start=moments[3], stop="latest"))
        assert start == (ROUNDS - 3) * EACH


def test_what_is_no_position_says_what_is() -> None:
    assert checked_position("-10m") == {"ago_ns": 600 * 10**9}
    assert checked_position(dt.timedelta(seconds=-2)) == {"ago_ns": 2 * 10**9}
    assert checked_position("1970-01-01T00:00:01Z") == {"time_ns": 10**9}
    assert checked_position(dt.datetime(1970, 1, 1, 1, tzinfo=dt.UTC)) == {"time_ns": 3600 * 10**9}
    for wrong in ("-10x", "yesterday", "2026-01-01", -1, 1.5, None, b"latest", "10"):
        with pytest.raises(InvalidArgument, match="RFC 3339"):
            checked_position(wrong)


@settings(deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_a_position_or_refused(text: str) -> None:
    try:
        checked_position(text)
    except InvalidArgument:
        pass


def test_a_broker_refuses_what_is_no_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from clients that check nothing."""
    monkeypatch.setattr(
        "danube_fast.client.values.options.checked_position", lambda position: position
    )
    topic = f"{TOPIC}-wrong"
    with danube_fast.connect(server.url) as client, client.producer(topic):
        for wrong in ({"time_ns": -1}, {"when": 1}, {}, {"time_ns": 1, "ago_ns": 2}):
            with pytest.raises(InvalidArgument, match="time_ns"):
                client.consumer(topic, subscription="s", initial_position=wrong)  # type: ignore[arg-type]
