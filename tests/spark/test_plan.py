"""Plans and their tasks: every message once, whatever the limits; filters and times choose blocks; no data directory."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from danube_fast.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from danube_fast.history.manifest import Manifest, Section
from danube_fast.history.stores.local import LocalStore
from danube_fast.spark import scan
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.plan import Bounds, PartitionRange, Plan, Snapshot, divide, make_plan
from danube_fast.spark.scan import read_task
from danube_fast.testing.broker import Broker
from tests.delivery.history_rig import NUMBER, SMALL, keep_for_ever, publish

TOPIC = "/default/planned"
COUNT = 20_000
KINDS = {
    "offset": pa.int64(), "payload": pa.binary(), "key": pa.binary(), "partition": pa.int32(),
    "topic": pa.string(), "sequence": pa.int64(), "publish_time": pa.timestamp("us", tz="UTC"),
}  # fmt: skip


@pytest.fixture(scope="module")
def filled(broker: Broker) -> Broker:
    """The broker with 20,000 numbered messages in history and log."""
    with broker.client() as client:
        keep_for_ever(client, TOPIC)
        publish(client, 0, COUNT // 2, TOPIC)
        client.admin.flush_history(TOPIC)
        publish(client, COUNT // 2, COUNT // 2, TOPIC)
    return broker


def _plan(broker: Broker, bounds: Bounds | None = None, **options: str) -> Plan:
    given = {"url": broker.url, "topic": TOPIC, **options}
    return make_plan(ReadOptions.parse(given), bounds)


def _stored(folder: Path) -> tuple[Path, Plan]:
    """A store with 3,000 messages, whose broker has gone with its data, and the plan of a read."""
    store = folder / "store"
    with Broker(workers=1, store=f"file://{store}", **SMALL) as running:
        with running.client() as client:
            keep_for_ever(client, TOPIC)
            publish(client, 0, 3000, TOPIC)
        plan = _plan(running)
    assert not Path(running.data_dir).exists()
    return store, plan


def _read(plan: Plan, columns: Sequence[str] = ("offset", "payload"), **options: Any) -> Any:
    """All rows of a plan, as executors that get pickled tasks read them."""
    schema = pa.schema([(name, KINDS[name]) for name in columns])
    batches = []
    for task in pickle.loads(pickle.dumps(plan.tasks)):
        batches += read_task(task, columns, schema, **options)
    return pa.Table.from_batches(batches, schema=schema)


def _numbers(table: Any) -> list[int]:
    return [NUMBER.unpack_from(payload)[0] for payload in table["payload"].to_pylist()]


def test_every_message_is_read_once(filled: Broker) -> None:
    for options in ({}, {"splitBytes": "65536"}, {"minPartitions": "50"}):
        plan = _plan(filled, **options)
        table = _read(plan)
        assert _numbers(table) == list(range(COUNT)), options
        assert table["offset"].to_pylist() == list(range(COUNT))
    assert len(_plan(filled).tasks) < len(_plan(filled, splitBytes="65536").tasks)
    assert len(_plan(filled, minPartitions="50").tasks) >= 10


@pytest.mark.parametrize(
    ("start", "end", "low", "high"),
    [
        ("earliest", "latest", 0, COUNT),
        ("17", "19000", 17, 19000),
        ('{"0": 5}', '{"/default/planned": {"0": 9}}', 5, 9),
        ("latest", "latest", COUNT, COUNT),
        ("100", "50", 0, 0),
        ("-1h", "latest", 0, COUNT),
    ],
)
def test_start_and_end(filled: Broker, start: str, end: str, low: int, high: int) -> None:
    table = _read(_plan(filled, start=start, end=end))
    assert table["offset"].to_pylist() == list(range(low, high))


def test_a_start_in_time(filled: Broker) -> None:
    everything = _read(_plan(filled), ("offset", "publish_time"))
    late = everything["publish_time"][COUNT // 2].as_py()
    table = _read(_plan(filled, start=late.isoformat()))
    found = table["offset"].to_pylist()
    assert found == list(range(found[0], COUNT)) and abs(found[0] - COUNT // 2) <= 500


def test_filters_choose_what_is_read(filled: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = LocalStore.read

    def counted(store: LocalStore, key: str, start: int = 0, count: int | None = None) -> bytes:
        data = read(store, key, start, count)
        reads.append(len(data))
        return data

    monkeypatch.setattr(LocalStore, "read", counted)

    def rows(bounds: Bounds) -> tuple[list[int], int]:
        plan = _plan(filled, bounds)
        reads.clear()
        return _read(plan)["offset"].to_pylist(), sum(reads)

    _, whole = rows(Bounds())
    found, some = rows(Bounds(offset_low=5000, offset_high=5010))
    assert found == list(range(5000, 5010)) and some < whole / 10
    times = _read(_plan(filled), ("publish_time",))["publish_time"]
    at = times.cast(pa.int64())[5000].as_py() * 1000
    found, some = rows(Bounds(publish_low_ns=at, publish_high_ns=at + 999))
    assert 5000 in found and some < whole / 4
    assert rows(Bounds(partitions=frozenset({3}))) == ([], 0)


def test_offsets_alone_are_read_from_tables_of_blocks(
    filled: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("offset", "partition")
    plan = _plan(filled, start="17", end="19990")
    expected = list(range(17, 19990))
    frames = scan.tables
    monkeypatch.setattr(scan, "tables", lambda *_: pytest.fail("frames were read"))
    assert _read(plan, names)["offset"].to_pylist() == expected
    monkeypatch.setattr(scan, "tables", frames)
    read_blocks = scan.read_blocks

    def with_holes(store: Any, section: Any) -> Any:
        rows = read_blocks(store, section).copy()
        rows["message_count"][1::2] -= 1  # as if a message were not there
        return rows

    monkeypatch.setattr(scan, "read_blocks", with_holes)
    assert sorted(_read(plan, names)["offset"].to_pylist()) == expected
    keyed = _plan(filled, Bounds(keys=frozenset({b"none"})))
    assert _read(keyed, names).num_rows == 0


def test_keys_choose_rows(broker: Broker) -> None:
    topic = "/default/keyed"
    with broker.client() as client:
        keep_for_ever(client, topic)
        with client.producer(topic) as producer:
            producer.send_many(
                [b"%d" % i for i in range(100)], keys=[b"k%d" % (i % 7) for i in range(100)]
            )
    table = _read(
        _plan(broker, Bounds(keys=frozenset({b"k3", b"none"})), topic=topic), ("key", "offset")
    )
    assert table["offset"].to_pylist() == list(range(3, 100, 7))
    assert set(table["key"].to_pylist()) == {b"k3"}


def test_partitions_have_their_index(broker: Broker) -> None:
    topic = "/default/parted"
    with broker.client() as client:
        client.admin.create_topic(topic, partitions=3)
        client.admin.set_topic_policy(topic, {"retention_policy": "forever"})
        with client.producer(topic) as producer:
            producer.send_many(
                [b"%d" % i for i in range(300)], keys=[b"%d" % i for i in range(300)]
            )
    table = _read(_plan(broker, topic=topic), ("partition", "payload", "topic"))
    assert sorted(map(int, table["payload"].to_pylist())) == list(range(300))
    assert set(table["partition"].to_pylist()) == {0, 1, 2}
    assert set(table["topic"].to_pylist()) == {topic}
    (url,) = {task.store for task in _plan(broker, topic=topic).tasks}
    alone = _read(
        make_plan(ReadOptions.parse({"store": url, "topic": topic})),
        ("partition", "payload", "topic"),
    )
    assert alone.sort_by("payload") == table.sort_by("payload")


def test_executors_need_the_store_alone(tmp_path: Path) -> None:
    store, plan = _stored(tmp_path)
    assert _numbers(_read(plan)) == list(range(3000))
    # and without a broker even plans
    options = ReadOptions.parse({"store": f"file://{store}", "topic": TOPIC})
    assert _numbers(_read(make_plan(options))) == list(range(3000))


def test_an_executor_of_another_host_tells_that_it_has_no_such_folder(tmp_path: Path) -> None:
    store, plan = _stored(tmp_path)
    store.rename(tmp_path / "elsewhere")
    with pytest.raises(
        FailedPrecondition, match=rf"history is in {store}, and the executor on .*mount it"
    ):
        _read(plan)


def test_a_damaged_block_is_told_or_passed_over(tmp_path: Path) -> None:
    store, plan = _stored(tmp_path)
    (path,) = [path for path in (store / "objects").rglob("*") if path.is_file()]
    data = bytearray(path.read_bytes())
    data[1_000_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        DataLoss, match=r"offsets \d+ to \d+ of /default/planned, partition 0, are lost"
    ):
        _read(plan)
    found = _numbers(_read(plan, fails_on_loss=False))
    assert 0 < len(found) < 3000 and sorted(found) == found
    path.unlink()  # as retention does when nothing holds it
    with pytest.raises(DataLoss, match=r"offsets 0 to 3000 .*the hold on them has ended"):
        _read(plan)
    assert _numbers(_read(plan, fails_on_loss=False)) == []


def test_messages_that_two_sections_have_are_read_once(tmp_path: Path) -> None:
    _, plan = _stored(tmp_path)
    (of,) = plan.ranges
    of.manifest.sections = [of.manifest.sections[0], *of.manifest.sections]
    options = ReadOptions.parse({"topic": TOPIC})
    assert _numbers(_read(divide(plan.snapshot, [of], options, Bounds()))) == list(range(3000))


def test_a_store_alone_is_read_by_the_newest_life_of_a_topic(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {**SMALL, "history_delete_seconds": 3600}
    options = ReadOptions.parse({"store": f"file://{store}", "topic": TOPIC})
    with (
        Broker(workers=1, store=f"file://{store}", **settings) as running,
        running.client() as client,
    ):
        keep_for_ever(client, TOPIC)
        publish(client, 0, 500, TOPIC)
        client.admin.flush_history(TOPIC)
        client.admin.delete_topic(TOPIC)
        keep_for_ever(client, TOPIC)
        publish(client, 500, 100, TOPIC)
        client.admin.flush_history(TOPIC)
        looks_like_a_part = f"{TOPIC}-part-3"
        keep_for_ever(client, looks_like_a_part)
        publish(client, 600, 50, looks_like_a_part)
        client.admin.flush_history(looks_like_a_part)
    assert _numbers(_read(make_plan(options))) == list(range(500, 600))
    other = ReadOptions.parse({"store": f"file://{store}", "topic": looks_like_a_part})
    table = _read(make_plan(other), ("topic", "partition", "payload"))
    assert _numbers(table) == list(range(600, 650))
    assert set(table["topic"].to_pylist()) == {looks_like_a_part}
    record = max((store / "manifests").glob("*/[0-9]*"))
    record.write_bytes(record.read_bytes()[:-1] + b"x")
    with pytest.raises(DataLoss, match="damaged"):
        make_plan(options)
    make_plan(options._replace(fails_on_loss=False))


def test_a_frame_that_cannot_be_read_is_told_or_ends_its_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a newer version, whose block is sound."""
    _, plan = _stored(tmp_path)
    read = scan.tables

    def torn(memory: bytes, low: int, high: int) -> Any:
        yield from read(memory[: len(memory) - 8], low, high)

    monkeypatch.setattr(scan, "tables", torn)
    with pytest.raises(
        DataLoss, match=r"offsets 0 to \d+ of /default/planned, partition 0, are lost"
    ):
        _read(plan)
    found = _numbers(_read(plan, fails_on_loss=False))
    assert 0 < len(found) < 3000 and found == list(range(len(found)))


def test_a_store_that_may_only_be_read_is_read_without_a_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = _stored(tmp_path)

    def refuse(*_: Any) -> None:
        raise PermissionDenied("only reading is allowed")

    monkeypatch.setattr(LocalStore, "create", refuse)
    plan = make_plan(ReadOptions.parse({"store": f"file://{store}", "topic": TOPIC}))
    assert plan.snapshot.holds == []
    assert _numbers(_read(plan)) == list(range(3000))


def test_a_topic_without_history_is_read(broker: Broker) -> None:
    """It is copied for as long as the plan holds its objects."""
    topic = "/default/passing"
    with broker.client() as client:
        client.admin.create_topic(topic, partitions=2)
        client.consumer(topic, subscription="slow").close()  # else a full log takes messages along
        with client.producer(topic) as producer:
            producer.send_many([NUMBER.pack(i) for i in range(2000)])
        plan = _plan(broker, topic=topic)
        assert plan.snapshot.holds
        assert sorted(_numbers(_read(plan))) == list(range(2000))
        for hold in plan.snapshot.holds:
            client.admin.release_history_hold(hold)


def test_what_cannot_be_read_is_refused(broker: Broker, tmp_path: Path) -> None:
    with broker.client() as client:
        client.admin.create_topic("/default/quick", durability="memory")
    with pytest.raises(FailedPrecondition, match="durability is memory"):
        _plan(broker, topic="/default/quick")
    with pytest.raises(NotFound, match="does not exist"):
        _plan(broker, topic="/default/nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NotFound, match="has no history of /default/x"):
        make_plan(ReadOptions.parse({"store": f"file://{empty}", "topic": "/default/x"}))
    for options, text in (
        ({"topic": ""}, "name what is read"),
        ({"topic": "x"}, "not a topic name"),
        ({"colums": "key"}, "did you mean columns"),
        ({"columns": "value"}, "no option value"),
        ({"start": "yesterday"}, "not a position"),
        ({"start": '{"0": -1}'}, "0 or more"),
        ({"start": '{"/default/y": {"0": 1}}'}, "another topic"),
        ({"start": '{"0": 1}', "topic": "/default/x,/default/y"}, "of one topic"),
        ({"kafka.bootstrap.servers": "h:1"}, "give url"),
        ({"holdSeconds": "0"}, "whole number from 1"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            ReadOptions.parse({"topic": "/default/x", **options})


def test_a_hundred_gigabytes_are_planned_in_seconds() -> None:
    """The bar is 1 s and 500 MB; a test allows five times as long."""
    gib, object_bytes = 1 << 30, 64 << 20
    count = 100 * gib // object_bytes
    per_object = object_bytes // 128
    manifest = Manifest()
    manifest.topic, manifest.end_offset = TOPIC, count * per_object
    manifest.sections = [
        Section(
            key=f"objects/{number:012d}", position=64, byte_count=object_bytes,
            base_offset=number * per_object, end_offset=(number + 1) * per_object,
            message_count=per_object, append_min_ns=number, append_max_ns=number + 1,
            publish_min_ns=number, publish_max_ns=number + 1, blocks_position=object_bytes,
            block_count=256, blocks_crc=0,
        )
        for number in range(count)
    ]  # fmt: skip
    of = PartitionRange(TOPIC, 0, 7, 0, manifest.end_offset, manifest)
    options = ReadOptions.parse({"topic": TOPIC, "splitBytes": "16777216"})
    tracemalloc.start()
    began = time.monotonic()
    plan = divide(Snapshot("file:///store", [], [of], {}), [of], options, Bounds())
    pickled = pickle.dumps(plan.tasks)
    seconds = time.monotonic() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plan.tasks) == 4 * count and len(pickled) < 10_000_000
    assert seconds < 5 and peak < 500_000_000, (seconds, peak)


def test_names_of_kafka_are_taken() -> None:
    with pytest.warns(UserWarning, match="here it is topic"):
        options = ReadOptions.parse({"subscribe": "/default/a,/default/b"})
    assert options.topics == ("/default/a", "/default/b")
    with pytest.warns(UserWarning, match="here it is start"):
        options = ReadOptions.parse({"topic": "/default/a", "startingTimestamp": "1700000000000"})
    assert options.start == {"time_ns": 1_700_000_000_000_000_000}
