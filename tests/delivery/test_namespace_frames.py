"""Rates of namespaces over a real broker of two workers, where lists are long beside the rate."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import danube_fast
from danube_fast.errors import DanubeError
from tests.crash.rig import Server
from tests.delivery.quota_rig import PAYLOAD, WAIT_SECONDS, Publishers, accepted, check
from tests.workers.broker import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("frames") / "data", workers=2, session_timeout_ms=30_000
    ) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[danube_fast.Client]:
    with danube_fast.connect(server.url) as connected:
        yield connected


class Lists(Publishers):
    """Each call has half a megabyte, in frames as large as they come."""

    def _run(self, topic: str) -> None:
        with self._server.client() as client:
            producer = client.producer(topic, timeout=WAIT_SECONDS, window_bytes_max=1 << 20)
            try:
                while not self._stop.is_set():
                    producer.send_many([PAYLOAD] * 500)
            except DanubeError as error:
                self.errors.append(error)
            finally:
                self._close(producer)


@pytest.mark.parametrize("is_live", [False, True], ids=["set before", "set while they publish"])
@pytest.mark.parametrize(
    ("name", "rate", "each"),
    [
        ("namespace_publish_bytes_per_second", 1_000_000, len(PAYLOAD)),
        ("namespace_publish_bytes_per_second", 4_000_000, len(PAYLOAD)),
        ("namespace_publish_messages_per_second", 1000, 1),
    ],
)
def test_a_publish_rate_holds_in_each_second_however_long_the_lists_are(
    client: danube_fast.Client, server: Server, name: str, rate: int, each: int, is_live: bool
) -> None:
    """A frame is taken whole, so producers make small ones where there is a rate."""
    namespace = f"lists-{name.split('_')[2]}-{rate}-{is_live:d}"
    client.admin.create_namespace(namespace)
    topics = [f"/{namespace}/t{number}" for number in range(2)]
    for topic in topics:
        client.admin.create_topic(topic, durability="memory")
    if not is_live:
        client.admin.set_namespace_quota(namespace, {name: rate})
    with Lists(server, topics) as lists:
        wait_until("the first messages", lambda: accepted(client, topics).count, WAIT_SECONDS)
        if is_live:
            client.admin.set_namespace_quota(namespace, {name: rate})
            calm = time.monotonic() + 8  # what was packed before goes as it is: a window of each
            while time.monotonic() < calm:
                accepted(client, topics)
        samples = [accepted(client, topics)]
        while samples[-1].after < samples[0].after + 5:
            samples.append(accepted(client, topics))
    check(namespace, samples, rate // each, 1.1)
    assert not lists.errors
