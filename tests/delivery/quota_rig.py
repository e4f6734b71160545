"""Publishers without a pause, and how many of their messages a broker accepts in each second."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any, NamedTuple

import danube_fast
from danube_fast.errors import DanubeError
from tests.crash.rig import Server

WAIT_SECONDS = 60.0
PAYLOAD = b"x" * 1000
FRAME_BYTES = 16 * 1024
"""Of the producers here: a frame is the grain of a rate and of a quota."""


class Publishers:
    """A thread for each topic that publishes as fast as it may, by a client of its own."""

    def __init__(self, server: Server, topics: list[str], timeout: float = 1) -> None:
        self._server, self._stop, self._timeout = server, threading.Event(), timeout
        self.errors: list[DanubeError] = []
        self._threads = [threading.Thread(target=self._run, args=(topic,)) for topic in topics]

    def _run(self, topic: str) -> None:
        options: dict[str, Any] = {
            "batch_bytes_max": FRAME_BYTES, "window_bytes_max": 16 * FRAME_BYTES, "timeout": self._timeout,
        }  # fmt: skip
        with self._server.client() as client:
            producer = client.producer(topic, **options)
            try:
                while not self._stop.is_set():
                    producer.send_many([PAYLOAD] * 8)
            except DanubeError as error:
                self.errors.append(error)
            finally:
                with_error = self._close(producer)
                if with_error is not None:
                    self.errors.append(with_error)

    @staticmethod
    def _close(producer: Any) -> DanubeError | None:
        try:
            producer.close()
        except DanubeError as error:
            return error
        return None

    def __enter__(self) -> Publishers:
        for thread in self._threads:
            thread.start()
        return self

    def join(self) -> None:
        """Wait until all have ended by themselves."""
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), f"a publisher goes on after {WAIT_SECONDS} s"

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.join()


class Sample(NamedTuple):
    """How many messages there were at some time between two."""

    after: float
    before: float
    count: int


def accepted(client: danube_fast.Client, topics: list[str]) -> Sample:
    """How many messages all these topics have."""
    count, after = 0, time.monotonic()
    for topic in topics:
        rows = client.admin.topic_stats(topic)["partition_stats"]
        count += sum(row["next_offset"] for row in rows)
    return Sample(after, time.monotonic(), count)


def windows(samples: list[Sample]) -> list[float]:
    """Messages a second, at least, in each window of a second: a busy machine counts late."""
    found = []
    for at, first in enumerate(samples):
        later = [each for each in samples[at:] if each.after - first.before >= 1.0]
        if later:
            found.append((later[0].count - first.count) / (later[0].before - first.after))
    return found


def check(name: str, samples: list[Sample], wanted: int, most: float) -> None:
    """The rate is kept in every second; on a busy machine publishers and consumers may have no turn for a while."""
    found = windows(samples)
    middle = statistics.median(found)
    text = (
        f"{name}: {min(found):.0f} to {max(found):.0f} in windows of a second, half of them above "
        f"{middle:.0f}, of {wanted}"
    )
    print(text)
    assert max(found) <= most * wanted, text
    assert middle >= 0.5 * wanted, text
