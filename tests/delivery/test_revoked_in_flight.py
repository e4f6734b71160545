"""A key or a right is taken away while lists of messages are on their way: what was acked stays, and nothing comes behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from danube_fast import MessageId
from danube_fast.errors import DanubeError, PermissionDenied, Unavailable
from tests.delivery.test_security import SecuredServer
from tests.workers.broker import wait_until

OWN = f"uid:{os.geteuid()}"
RIGHTS_SECONDS, KEYS_SECONDS = 2.0, 5.0
STILL_SECONDS = 1.0
WAIT_SECONDS = 20.0
LIST_MESSAGES = 500
PAYLOAD_BYTES = 100
WINDOW_BYTES = 64 * 1024
BEFORE = 1000
"""So many messages of each topic are acked before the change."""
TOPICS_MAX = 16
"""So many topics are made until each worker has one."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("in-flight")
    with SecuredServer(folder / "data", folder) as secured:
        secured.make_ann()
        yield secured


@pytest.fixture
def ann(server: SecuredServer) -> Iterator[Any]:
    with server.come_in("ann") as client:
        yield client


class Pipeline:
    """A user who sends list behind list to one worker until that is refused, and keeps what was acked."""

    def __init__(self, server: SecuredServer, user: str, topic: str, transport: str) -> None:
        self._client = server.come_in(user, transport=transport, timeout=5.0)
        self.topic = topic
        self.producer = self._client.producer(
            topic, window_bytes_max=WINDOW_BYTES, batch_bytes_max=8192, timeout=5.0
        )
        self.acked: list[MessageId] = []
        self.sent = 0
        self.refusal: DanubeError | None = None
        self.told = 0.0
        self.in_flight = 0
        """Messages that were sent and not acked when the client was told."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _delivered(self, message_id: MessageId | None, error: DanubeError | None) -> None:
        if message_id is not None:
            self.acked.append(message_id)

    def _run(self) -> None:
        try:
            while True:
                numbers = range(self.sent, self.sent + LIST_MESSAGES)
                payloads = [(b"%d" % number).ljust(PAYLOAD_BYTES) for number in numbers]
                self.sent += LIST_MESSAGES
                self.producer.send_many(payloads, on_delivery=self._delivered)
        except DanubeError as error:
            self.refusal, self.told = error, time.monotonic()
            self.in_flight = self.sent - len(self.acked)

    def __enter__(self) -> Pipeline:
        self._thread.start()
        wait_until("messages that are acked", self._is_under_way, WAIT_SECONDS)
        return self

    def _is_under_way(self) -> bool:
        assert self.refusal is None, self.refusal
        return len(self.acked) > BEFORE

    def join(self, seconds: float) -> None:
        """Wait until it is refused."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"nothing is refused after {seconds} s"

    def try_again(self) -> str:
        """Publish by a handle of its own; what that comes to."""
        try:
            with self._client.producer(self.topic, timeout=2.0) as producer:
                producer.publish(b"late")
        except DanubeError as error:
            return type(error).__name__
        return "accepted"

    def __exit__(self, *_: object) -> None:
        for close in (self.producer.close, self._client.close):
            try:
                close()
            except DanubeError:  # what was refused is told once more
                continue


def end_of(admin: Any, topic: str) -> int:
    """The end offset of a topic of one partition."""
    (row,) = admin.topic_stats(topic)["partition_stats"]
    return int(row["end_offset"])


def topics_on_both(admin: Any, namespace: str) -> list[str]:
    """A topic of one partition on each worker."""
    admin.create_namespace(namespace)
    found: dict[int, str] = {}
    for number in range(TOPICS_MAX):
        topic = f"/{namespace}/t{number}"
        admin.create_topic(topic, durability="os")
        found.setdefault(admin.describe_topic(topic)["placement"][0]["worker"], topic)
        if len(found) == 2:
            break
    return [found[worker] for worker in (0, 1)]


def all_of(client: Any, topic: str) -> dict[MessageId, bytes]:
    """All that is there to read."""
    with client.reader(topic, start="earliest", stop="latest") as reader:
        return {each.message_id: each.payload for each in reader}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("what", ["right", "key"])
def test_what_is_in_flight_is_accepted_before_the_client_is_told_or_never(
    server: SecuredServer, ann: Any, what: str, transport: str
) -> None:
    user, namespace = f"pia-{what}-{transport}", f"shop-{what}-{transport}"
    topics = topics_on_both(ann.admin, namespace)
    server.add(ann.admin, user, ("producer", f"/{namespace}/*"))
    proofs = [f"curve:{server.keys[user]}"]
    if transport == "shm":
        proofs.insert(0, OWN)
        ann.admin.set_credential(OWN, user)
    with ExitStack() as stack:
        pipelines = [
            stack.enter_context(Pipeline(server, user, topic, transport)) for topic in topics
        ]
        if what == "right":
            ann.admin.delete_security("binding", f"{user}-0")
        else:
            for proof in proofs:
                ann.admin.delete_security("credential", proof)
        changed = time.monotonic()
        bound = RIGHTS_SECONDS if what == "right" else KEYS_SECONDS
        for pipeline in pipelines:
            pipeline.join(bound + WAIT_SECONDS)
            check_refusal(pipeline, changed, of_rings=transport == "shm" and what == "key")
        before = [end_of(ann.admin, topic) for topic in topics]
        last = max(changed + bound, *(pipeline.told for pipeline in pipelines))
        tries = 0
        while not tries or time.monotonic() < last + STILL_SECONDS:
            for pipeline in pipelines:
                assert pipeline.try_again() in ("PermissionDenied", "Unavailable")
            tries += 1
        ends = [end_of(ann.admin, topic) for topic in topics]
        assert ends == before, "something is accepted behind the word to the client"
    for pipeline, end in zip(pipelines, ends, strict=True):
        acked = set(pipeline.acked)
        print(f"in flight: {len(acked)} acked, {pipeline.in_flight} in flight, end {end}")
        assert len(acked) == len(pipeline.acked), "a message is acked twice"
        assert end <= len(acked) + pipeline.in_flight
        found = all_of(ann, pipeline.topic)
        assert len(found) == end, "offsets are missing"
        assert acked <= set(found), "acked messages are lost"
        assert len(set(found.values())) == end, "a message is there twice"
        assert b"late" not in found.values()
    if transport == "shm" and what == "right":
        ann.admin.delete_security("credential", OWN)


def check_refusal(pipeline: Pipeline, changed: float, *, of_rings: bool) -> None:
    """Check how a client is told: one that takes no lane but rings hears that it has none any more."""
    refusal = pipeline.refusal
    print(f"\nin flight: {type(refusal).__name__} after {pipeline.told - changed:.3f} s")
    if of_rings:
        assert isinstance(refusal, Unavailable) and "is not registered" in str(refusal)
    else:
        assert isinstance(refusal, PermissionDenied), repr(refusal)
