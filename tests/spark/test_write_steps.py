"""Writes without a Spark session: drivers killed at each step, two of them, batches in a row, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from danube_fast.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ProducerFenced,
)
from danube_fast.history.audit import verify_history
from danube_fast.history.stores.store import ObjectStore
from danube_fast.spark.write import publishing, staging
from danube_fast.spark.write.publishing import (
    STEPS,
    BrokerLink,
    finish_batch,
    forget_write,
    publish_proposal,
)
from danube_fast.spark.write.record import batch_prefix, create_commit, list_batches, read_commit
from danube_fast.spark.write.staging import open_staging
from danube_fast.testing.broker import Broker
from tests.spark.write_rig import (
    assert_once,
    killed_driver,
    numbers,
    payloads_of,
    propose,
    stage,
    write,
)

COUNT = 2000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where rows are staged."""
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


@pytest.fixture
def store(folder: Path) -> ObjectStore:
    return open_staging(f"file://{folder}")


@pytest.fixture
def topic(broker: Broker, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    with broker.client() as client:
        client.admin.create_topic(f"/default/{name}")
    return f"/default/{name}"


@pytest.fixture(autouse=True)
def _small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "OBJECT_BYTES", 1000)


@pytest.mark.parametrize("step", STEPS)
def test_a_driver_is_killed(broker: Broker, topic: str, folder: Path, step: str) -> None:
    """What was committed counts, whatever the next driver would write."""
    killed_driver(broker.url, folder, topic, "nightly", 0, COUNT, step)
    again = numbers(COUNT, COUNT + 500)
    rows = write(broker.url, f"file://{folder}", topic, "nightly", again, run="again")
    expected = again if step == "staged" else numbers(0, COUNT)
    assert rows == len(expected)
    with broker.client() as client:
        assert_once(client, topic, expected)
    (state,) = list_batches(open_staging(f"file://{folder}"), "nightly")
    assert state.is_done and not state.staged


def test_a_killed_write_is_resumed_without_its_job(
    broker: Broker, topic: str, folder: Path, store: ObjectStore
) -> None:
    killed_driver(broker.url, folder, topic, "w", 0, COUNT, "half")
    with broker.client() as client:
        assert len(payloads_of(client, topic)) > 0
        (state,) = list_batches(store, "w")
        assert state.state == "committed" and state.staged
        with BrokerLink(broker.url, 30) as link:
            assert finish_batch(link, store, state) == COUNT
        assert_once(client, topic, numbers(0, COUNT))
        (state,) = list_batches(store, "w")
        assert state.state == "done" and not state.staged
        with BrokerLink(broker.url, 30) as link:
            assert finish_batch(link, store, state) == COUNT
        assert_once(client, topic, numbers(0, COUNT))


@pytest.mark.parametrize("step", STEPS)
def test_a_second_driver_does_all(
    broker: Broker, topic: str, folder: Path, store: ObjectStore, step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The second one comes while the first is at a step, and ends before it goes on."""
    outcomes: list[int] = []

    def reached(at: str) -> None:
        if at == step and not outcomes:
            outcomes.append(0)
            outcomes.append(
                write(broker.url, f"file://{folder}", topic, "w", numbers(COUNT, 500), run="second")
            )

    monkeypatch.setattr(publishing, "reached", reached)
    expected = numbers(COUNT, 500) if step == "staged" else numbers(0, COUNT)
    with BrokerLink(broker.url, 30) as link:
        proposal = propose(link, store, topic, "w", numbers(0, COUNT), run="first")
        assert publish_proposal(link, store, proposal) == len(expected)
    with broker.client() as client:
        assert_once(client, topic, expected)
    assert outcomes[1] == len(expected)


@pytest.mark.parametrize("step", ["committed", "half"])
def test_a_second_driver_fences_the_first(
    broker: Broker, topic: str, folder: Path, store: ObjectStore, step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with BrokerLink(broker.url, 30) as link, BrokerLink(broker.url, 30) as other:

        def reached(at: str) -> None:
            if at == step:
                other.open_frames(topic, "w")

        monkeypatch.setattr(publishing, "reached", reached)
        proposal = propose(link, store, topic, "w", numbers(0, COUNT), run="first")
        with pytest.raises(ProducerFenced, match="another driver goes on with w, batch 0; end one"):
            publish_proposal(link, store, proposal)
        assert list_batches(store, "w")[0].state == "committed"
        monkeypatch.undo()
        assert publish_proposal(link, store, proposal) == COUNT
    with broker.client() as client:
        assert_once(client, topic, numbers(0, COUNT))


def test_two_drivers_commit_at_once(
    broker: Broker, topic: str, folder: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sees a commit before it makes its own: the first one counts."""
    killed_driver(broker.url, folder, topic, "w", 0, COUNT, "committed")
    monkeypatch.setattr(publishing, "try_read_commit", lambda *_: None)
    rows = write(broker.url, store.url, topic, "w", numbers(COUNT, 10), run="second")
    assert rows == COUNT
    with broker.client() as client:
        assert_once(client, topic, numbers(0, COUNT))


def test_a_row_above_the_limit_of_the_topic_is_refused_before_the_commit(
    broker: Broker, topic: str, store: ObjectStore
) -> None:
    with BrokerLink(broker.url, 30) as link, broker.client() as client:
        client.admin.set_topic_policy(topic, {"message_bytes_max": 1000})
        with pytest.raises(InvalidArgument, match="1000"):
            propose(link, store, topic, "large", [b"x" * 500, b"x" * 2000])
        assert not any(each.is_committed for each in list_batches(store, "large"))
        rows = propose(link, store, topic, "large", [b"x" * 500, b"y" * 1000])
        assert publish_proposal(link, store, rows) == 2


def test_batches_of_a_stream_follow_each_other(
    broker: Broker, topic: str, folder: Path, store: ObjectStore
) -> None:
    """A commit that was not published goes first; of batches that are done the newest stays."""
    with BrokerLink(broker.url, 30) as link, broker.client() as client:
        for batch in (0, 1):
            rows = propose(
                link, store, topic, "s", numbers(batch * 100, 100), batch=batch, query="q"
            )
            assert publish_proposal(link, store, rows) == 100
        assert [(each.batch, each.state) for each in list_batches(store, "s")] == [(1, "done")]
        pending = propose(link, store, topic, "s", numbers(200, 100), batch=2, query="q")
        publisher = link.open_frames(topic, "s")
        create_commit(store, publishing._commit_of(pending, publisher))
        link.close_frames(publisher)
        rows = propose(link, store, topic, "s", numbers(300, 100), batch=3, query="q")
        assert publish_proposal(link, store, rows) == 100
        assert payloads_of(client, topic) == numbers(0, 400)
        assert [(each.batch, each.state) for each in list_batches(store, "s")] == [(3, "done")]
        late = propose(link, store, topic, "s", numbers(900, 100), batch=1, query="q", run="late")
        with pytest.raises(FailedPrecondition, match="its checkpoint is an old copy"):
            publish_proposal(link, store, late)
        assert payloads_of(client, topic) == numbers(0, 400)
        other = propose(link, store, topic, "s", numbers(0, 10), batch=0, query="another")
        with pytest.raises(FailedPrecondition, match="that of another query"):
            publish_proposal(link, store, other)


def test_a_stream_that_has_begun_under_another_write_id(
    broker: Broker, topic: str, store: ObjectStore
) -> None:
    """Spark has lost its own commit of the last batch, and repeats it: under another id it would double."""
    with BrokerLink(broker.url, 30) as link, broker.client() as client:
        for batch, payloads in ((0, numbers(0, 10)), (1, []), (2, []), (3, numbers(10, 10))):
            rows = propose(link, store, topic, "stream-q", payloads, batch=batch, query="q")
            assert publish_proposal(link, store, rows) == len(payloads)
        for write_id, batch in (("foo", 3), ("foo", 4), ("foo", 1)):
            rows = propose(link, store, topic, write_id, numbers(10, 10), batch=batch, query="q")
            with pytest.raises(FailedPrecondition, match=f"none of them under {write_id}: they"):
                publish_proposal(link, store, rows)
        assert not any(each.is_committed for each in list_batches(store, "foo"))
        again = propose(link, store, topic, "stream-q", numbers(10, 10), batch=3, query="q")
        assert publish_proposal(link, store, again) == 10
        assert payloads_of(client, topic) == numbers(0, 20)
        forget_write(store, "stream-q")
        rows = propose(link, store, topic, "stream-q", numbers(20, 10), batch=4, query="q")
        with pytest.raises(FailedPrecondition, match=r"writes abort`; .* begin a new checkpoint"):
            publish_proposal(link, store, rows)


def test_a_stream_whose_first_batch_was_published_without_its_write_id(
    broker: Broker, topic: str, store: ObjectStore
) -> None:
    with BrokerLink(broker.url, 30) as link, broker.client() as client:
        rows = propose(link, store, topic, "stream-first", numbers(0, 10), query="first")
        assert publish_proposal(link, store, rows) == 10
        rows = propose(link, store, topic, "added", numbers(0, 10), query="first")
        with pytest.raises(FailedPrecondition, match="none of them under added"):
            publish_proposal(link, store, rows)
        rows = propose(link, store, topic, "added", numbers(10, 10), query="second", run="s")
        assert publish_proposal(link, store, rows) == 10
        assert payloads_of(client, topic) == numbers(0, 20)


def test_a_job_whose_write_was_given_up_meanwhile(
    broker: Broker, topic: str, store: ObjectStore
) -> None:
    """Its tasks have staged nothing, as the rows were committed when it began."""
    with BrokerLink(broker.url, 30) as link, broker.client() as client:
        write(broker.url, store.url, topic, "w", numbers(0, 10))
        ids = link.target(topic, store.url).partition_ids
        proposal = publishing.Proposal("w", 0, "", topic, ids, [], must_exist=True)
        assert publish_proposal(link, store, proposal) == 10
        forget_write(store, "w")
        with pytest.raises(FailedPrecondition, match="given up while its job ran again"):
            publish_proposal(link, store, proposal)
        assert payloads_of(client, topic) == numbers(0, 10)


def test_a_topic_that_keeps_nothing(broker: Broker, store: ObjectStore) -> None:
    with broker.client() as client, BrokerLink(broker.url, 30) as link:
        client.admin.create_topic("/default/fast", dispatch="non_reliable")
        with pytest.raises(FailedPrecondition, match="is non_reliable"):
            link.target("/default/fast", store.url)


def test_another_topic(broker: Broker, topic: str, folder: Path) -> None:
    url = f"file://{folder}"
    write(broker.url, url, topic, "w", numbers(0, 10))
    with pytest.raises(FailedPrecondition, match=f"write_id w is that of a write to {topic}"):
        write(broker.url, url, f"{topic}2", "w", numbers(0, 10))
    for query, write_id, text in (
        ("b1", "stream-b1", f"that of a stream to {topic}; use another checkpointLocation for"),
        ("b2", "mine", f"a write to {topic}; choose another one and another checkpointLocation"),
    ):
        write(broker.url, url, topic, write_id, numbers(0, 10), query=query)
        with pytest.raises(FailedPrecondition, match=text):
            write(broker.url, url, f"{topic}2", write_id, numbers(0, 10), query=query, batch=1)


def test_a_topic_that_was_made_again(
    broker: Broker, topic: str, folder: Path, store: ObjectStore
) -> None:
    killed_driver(broker.url, folder, topic, "w", 0, COUNT, "committed")
    (state,) = list_batches(store, "w")
    with broker.client() as client, BrokerLink(broker.url, 30) as link:
        client.admin.delete_topic(topic)
        with pytest.raises(FailedPrecondition, match="was deleted before all rows of w"):
            finish_batch(link, store, state)
        client.admin.create_topic(topic)
        with pytest.raises(FailedPrecondition, match="deleted and made again"):
            finish_batch(link, store, state)
        with pytest.raises(FailedPrecondition, match="deleted and made again"):
            publish_proposal(link, store, propose(link, store, topic, "w", numbers(0, 10)))
        assert payloads_of(client, topic) == []
        assert [each.state for each in forget_write(store, "w")] == ["committed"]
        assert write(broker.url, store.url, topic, "w", numbers(0, 10)) == 10
        with pytest.raises(NotFound, match="knows no write x"):
            forget_write(store, "x")


def _keyed(keys: list[bytes | None]) -> pa.Table:
    payloads = [key or b"none" for key in keys]
    return pa.table(
        {"payload": pa.array(payloads, pa.binary()), "key": pa.array(keys, pa.binary())}
    )


def _partitions(client: Any, topic: str) -> dict[bytes, int]:
    """Which partition each key is in."""
    found: dict[bytes, int] = {}
    with client.reader(topic, start="earliest", stop="latest") as reader:
        for message in reader:
            index = int(message.topic.rpartition("-part-")[2])
            assert found.setdefault(message.key, index) == index
    return found


def test_partitions_are_those_of_a_producer(broker: Broker, store: ObjectStore) -> None:
    """By key hash; those of a commit stay in force where the topic has grown since."""
    keys: list[bytes | None] = [b"key %d" % number for number in range(300)]
    with broker.client() as client, BrokerLink(broker.url, 30) as link:
        for name in ("/default/by-client", "/default/by-spark"):
            client.admin.create_topic(name, partitions=4)
        with client.producer("/default/by-client") as producer:
            for key in keys:
                producer.send(key, key=key)
        ids, objects = stage(link, store, "/default/by-spark", "w", _keyed(keys))
        proposal = publishing.Proposal("w", 0, "", "/default/by-spark", ids, objects)
        client.admin.set_topic("/default/by-spark", partitions=6)
        assert publish_proposal(link, store, proposal) == len(keys)
        wanted = _partitions(client, "/default/by-client")
        assert _partitions(client, "/default/by-spark") == wanted
        assert len(set(wanted.values())) == 4


def test_rows_without_keys_and_rows_that_name_a_partition(
    broker: Broker, store: ObjectStore
) -> None:
    topic = "/default/spread"
    with broker.client() as client, BrokerLink(broker.url, 30) as link:
        client.admin.create_topic(topic, partitions=3)
        size = 400_000
        rows = pa.table({"payload": pa.array([b"%d" % i + b"." * size for i in range(12)])})
        ids, objects = stage(link, store, topic, "turns", rows)
        per_partition: Counter[int] = Counter()
        for each in objects:
            per_partition.update(each.rows)
        assert per_partition == {0: 4, 1: 4, 2: 4}
        named = pa.table(
            {
                "payload": pa.array([b"a", b"b", b"c", b"d"]),
                "key": pa.array([None, b"k", None, b"k"]),
                "partition": pa.array([2, 1, None, 0], pa.int32()),
            }
        )
        ids, objects = stage(link, store, topic, "named", named)
        publish_proposal(link, store, publishing.Proposal("named", 0, "", topic, ids, objects))
        with client.reader(topic, start="earliest", stop="latest") as reader:
            found = {bytes(m.payload): int(m.topic[-1]) for m in reader}
        assert {name: found[name] for name in (b"a", b"b", b"d")} == {b"a": 2, b"b": 1, b"d": 0}
        assert len(found) == 4
        wrong = pa.table({"payload": [b"x"], "partition": pa.array([3], pa.int32())})
        with pytest.raises(
            InvalidArgument, match="partition has 3, and the topic has partitions 0 to 2"
        ):
            stage(link, store, topic, "wrong", wrong)


def test_large_messages(broker: Broker, topic: str, store: ObjectStore) -> None:
    large = b"x" * 400_000
    with broker.client() as client, BrokerLink(broker.url, 30) as link:
        rows = [b"small", large, b"small too"]
        publish_proposal(link, store, propose(link, store, topic, "large", rows))
        assert payloads_of(client, topic) == rows
        limit = link.target(topic, store.url).limits["message_bytes_max"]
        with pytest.raises(InvalidArgument, match="message_bytes_max"):
            propose(link, store, topic, "larger", [b"y" * (limit + 4096)])


def test_a_producer_that_the_broker_has_forgotten(
    broker: Broker, topic: str, store: ObjectStore
) -> None:
    """Its sequences begin again, so nothing tells what is published: refused, and so from then on."""
    with BrokerLink(broker.url, 30) as link, broker.client() as client:
        for write_id, sequences, epochs in (("later", [50], [1]), ("first", [0], [7])):
            proposal = propose(link, store, topic, write_id, numbers(0, 100))
            publisher = link.open_frames(topic, "of the test")
            made = publishing._commit_of(proposal, publisher)
            link.close_frames(publisher)
            commit = type(made)(
                **{name: getattr(made, name) for name in made.__struct_fields__}
                | {"sequences": sequences, "producer_epochs": epochs}
            )
            create_commit(store, commit)
            for _ in range(9):  # each try makes the epoch of the producer larger
                (state,) = list_batches(store, write_id)
                with pytest.raises(FailedPrecondition, match="it cannot be told which rows"):
                    finish_batch(link, store, state)
            with pytest.raises(FailedPrecondition, match="it cannot be told which rows"):
                publish_proposal(link, store, proposal)
            assert list_batches(store, write_id)[0].state == "doubtful"
        assert payloads_of(client, topic) == []


def test_damage_is_told(broker: Broker, topic: str, folder: Path, store: ObjectStore) -> None:
    killed_driver(broker.url, folder, topic, "w", 0, COUNT, "committed")
    commit = read_commit(store, "w", 0)
    (state,) = list_batches(store, "w")
    first, second = (folder / each.key for each in commit.objects[:2])
    with BrokerLink(broker.url, 30) as link:
        sound = first.read_bytes()
        first.write_bytes(sound[:-1] + b"?")
        with pytest.raises(DataLoss, match="has other bytes than were staged"):
            finish_batch(link, store, state)
        first.write_bytes(sound)
        moved = second.rename(second.with_suffix(".away"))
        with pytest.raises(DataLoss, match="is missing, and not all of its rows"):
            finish_batch(link, store, state)
        moved.rename(second)
        record = folder / f"{batch_prefix('w', 0)}record"
        good = record.read_bytes()
        for bad in (b"", good[:-1], good[:40] + b"?" + good[41:], b"?" * len(good)):
            record.write_bytes(bad)
            with pytest.raises(DataLoss, match="writes abort"):
                finish_batch(link, store, state)
        record.write_bytes(good)
        assert finish_batch(link, store, state) == COUNT
    with broker.client() as client:
        assert_once(client, topic, numbers(0, COUNT))


def test_a_store_of_history_may_have_writes(broker: Broker, topic: str, store_folder: Path) -> None:
    """What is staged there is no damage and no orphan of history."""
    store = open_staging(f"file://{store_folder}")
    with BrokerLink(broker.url, 30) as link, broker.client() as client:
        kept = f"{topic}-kept"
        client.admin.create_topic(kept)
        client.admin.set_topic_policy(kept, {"retention_policy": "forever"})
        client.publish(kept, b"x")
        client.admin.flush_history(kept)
        assert link.target(topic, None).store == store.url
        proposal = propose(link, store, topic, "w", numbers(0, 10))
        report = verify_history(store, None)
        assert not report.damages and not report.orphans and report.objects > 0
        assert publish_proposal(link, store, proposal) == 10
