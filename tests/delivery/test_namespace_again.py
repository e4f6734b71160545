"""A namespace with a quota that is deleted, and made again, while publishers are at work."""

from __future__ import annotations

from pathlib import Path

import pytest

from danube_fast.errors import NotFound, ResourceExhausted, TopicDeleted, Unavailable
from tests.crash.rig import Server
from tests.delivery.test_namespace_quotas import (
    FRAME_BYTES,
    WAIT_SECONDS,
    Publishers,
    answers,
    used,
    workers_of,
)
from tests.workers.broker import wait_until


@pytest.mark.parametrize("victim", ["none", "worker", "coordinator"])
def test_a_namespace_that_is_deleted_and_made_again_under_load_begins_anew(
    tmp_path: Path, victim: str
) -> None:
    """Nothing that the first one kept, had open or was told counts for the second."""
    limit, storage, handles = 2_000_000, "namespace_storage_bytes_max", "namespace_handles_max"
    topics = [f"/again/t{number}" for number in range(4)]
    with (
        Server(tmp_path / "data", workers=2, session_timeout_ms=30_000) as server,
        server.client() as client,
    ):
        admin = client.admin

        def make(**quota: int) -> None:
            admin.create_namespace("again")
            admin.set_namespace_quota("again", {"namespace_topics_max": 4, **quota})
            for topic in topics:
                admin.create_topic(topic, durability="os")
            assert workers_of(client, topics) == {0, 1}

        make(**{storage: 1 << 30, handles: 5}, namespace_publish_messages_per_second=2000)
        with Publishers(server, topics) as publishers:
            wait_until("load", lambda: used(client, "again", storage) > limit, WAIT_SECONDS)
            for topic in topics:
                admin.delete_topic(topic)
            admin.delete_namespace("again")
            if victim != "none":
                server.kill(victim, 1) if victim == "worker" else server.kill(victim)
                wait_until("the coordinator", lambda: answers(client), WAIT_SECONDS)
            publishers.join()
            ends = (NotFound, TopicDeleted, Unavailable)
            assert all(isinstance(error, ends) for error in publishers.errors), publishers.errors
        make(**{storage: limit, handles: 5})
        assert used(client, "again", "namespace_topics_max") == 4
        wait_until("no handle", lambda: used(client, "again", handles) == 0, WAIT_SECONDS)
        wait_until("nothing kept", lambda: used(client, "again", storage) == 0, WAIT_SECONDS)
        with Publishers(server, topics) as publishers:
            publishers.join()
        for error in publishers.errors:
            assert isinstance(error, ResourceExhausted), error
            assert "namespace again" in str(error) and storage in str(error)
        kept = sum(admin.topic_stats(topic)["bytes_in"] for topic in topics)
        assert limit - 8 * FRAME_BYTES <= kept <= limit + 2 * FRAME_BYTES, kept - limit
