"""Replays: every message once and in order, whatever kills them; pace; tables; what is refused."""

from __future__ import annotations

import datetime as dt
import json
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danube_fast.cli.main import main
from danube_fast.clock import SECOND_NS
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from danube_fast.spark.replay import run as run_module
from danube_fast.spark.replay.rows import NO_TIME, Block, Stream, merged
from danube_fast.spark.replay.run import Outcome, Replay, replay
from danube_fast.testing.broker import Broker
from danube_fast.testing.virtual_clock import VirtualClock
from tests.delivery.history_rig import NUMBER, keep_for_ever
from tests.workers.broker import wait_until

SOURCE = "/default/replayed"
COUNT = 3000
EVENT = dt.datetime(2013, 1, 1, 5, 30, tzinfo=dt.UTC)
Row = tuple[int, bytes | None, dict[str, str], Any]
"""Number, key, attributes, event time."""


@pytest.fixture(scope="module")
def filled(broker: Broker) -> Broker:
    """The broker with a topic of two partitions: keys, and messages that have everything or little."""
    with broker.client() as client:
        client.admin.create_topic(SOURCE, partitions=2)
        client.admin.set_topic_policy(SOURCE, {"retention_policy": "forever"})
        with client.producer(SOURCE, name="loader") as producer:
            for i in range(COUNT):
                producer.send(
                    NUMBER.pack(i),
                    key=b"k%d" % (i % 7) if i % 10 else None,
                    attributes={"n": str(i)} if i % 3 == 0 else None,
                    event_time=EVENT + dt.timedelta(seconds=i) if i % 2 else None,
                )
    return broker


@pytest.fixture
def make_target(broker: Broker, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Make an empty topic for a test."""

    def make(**options: Any) -> str:
        name = f"/default/target-{abs(hash(request.node.name)) % 10**12}"
        with broker.client() as client:
            client.admin.create_topic(name, **options)
            client.admin.set_topic_policy(name, {"retention_policy": "forever"})
        return name

    return make


def _run(broker: Broker, source: str, target: str, folder: Path, **options: Any) -> Outcome:
    given = {"url": broker.url, "checkpoint": folder, **options}
    hooks = {name: given.pop(name) for name in ("clock", "sleep") if name in given}
    return replay(Replay(source, target, **given), **hooks)


def _rows(broker: Broker, topic: str) -> dict[str, list[Row]]:
    """All messages by partition, in their order."""
    found: dict[str, list[Row]] = defaultdict(list)
    with broker.client() as client:
        left = _count(client, topic)
        with client.reader(topic) as reader:
            while left:
                batch = reader.receive_batch(left, timeout=60)
                assert len(batch), f"{left} messages of {topic} do not come"
                left -= len(batch)
                for message in batch:
                    number = NUMBER.unpack_from(message.payload)[0]
                    found[message.topic].append(
                        (number, message.key, dict(message.attributes or {}), message.event_time)
                    )
    return found


def _count(client: Any, topic: str) -> int:
    """Messages of a topic."""
    return sum(each["end_offset"] for each in client.admin.topic_stats(topic)["partition_stats"])


def _numbers(rows: dict[str, list[Row]]) -> list[int]:
    return sorted(row[0] for some in rows.values() for row in some)


def test_partition_by_partition(filled: Broker, make_target: Any, tmp_path: Path) -> None:
    target = make_target(partitions=2)
    done = _run(filled, SOURCE, target, tmp_path)
    assert (done.messages, done.skipped, done.is_by_key, done.is_done) == (COUNT, 0, False, True)
    assert done.byte_count == COUNT * NUMBER.size
    before, after = _rows(filled, SOURCE), _rows(filled, target)
    for part in range(2):
        assert after[f"{target}-part-{part}"] == before[f"{SOURCE}-part-{part}"] != []
    again = _run(filled, SOURCE, target, tmp_path)
    assert (again.messages, again.skipped) == (0, COUNT)


def test_by_key_where_partitions_differ(filled: Broker, make_target: Any, tmp_path: Path) -> None:
    target = make_target(partitions=3)
    assert _run(filled, SOURCE, target, tmp_path).is_by_key
    before, after = _rows(filled, SOURCE), _rows(filled, target)
    assert _numbers(after) == list(range(COUNT))

    def by_key(rows: dict[str, list[Row]]) -> dict[bytes | None, list[Row]]:
        found: dict[bytes | None, list[Row]] = defaultdict(list)
        for some in rows.values():
            for row in some:
                if row[1] is not None:
                    found[row[1]].append(row)
        return found

    assert by_key(after) == by_key(before)
    with filled.client() as client, client.producer(target) as producer:
        place = {key: producer.publish(NUMBER.pack(0), key=key).topic for key in by_key(before)}
    for partition, some in after.items():
        assert all(place.get(key, partition) == partition for _, key, _, _ in some)
    keyless = [sum(row[1] is None for row in some) for some in after.values()]
    assert min(keyless) > COUNT // 10 // 4


def test_a_range_of_offsets_without_the_broker_of_the_source(
    filled: Broker, make_target: Any, tmp_path: Path, store_folder: Path
) -> None:
    with filled.client() as client:
        client.admin.flush_history(SOURCE)
    target = make_target(partitions=2)
    options = {"url": None, "to_url": filled.url, "store": f"file://{store_folder}"}
    ends = {"start": '{"0": 10, "1": 20}', "end": '{"0": 110, "1": 30}'}
    done = _run(filled, SOURCE, target, tmp_path, **options, **ends)
    assert done.messages == 110
    assert done.ranges == [
        {"partition": 0, "start": 10, "end": 110}, {"partition": 1, "start": 20, "end": 30},
    ]  # fmt: skip
    before, after = _rows(filled, SOURCE), _rows(filled, target)
    assert after[f"{target}-part-0"] == before[f"{SOURCE}-part-0"][10:110]
    assert after[f"{target}-part-1"] == before[f"{SOURCE}-part-1"][20:30]


# ---------------------------------------------------------------- kills


def _table(
    folder: Path, count: int, *, partitions: int = 2, seconds: float = 2.0, row_group: int = 300
) -> Path:
    """Rows of two partitions in several files, which are not in their order."""
    folder.mkdir()
    chance = random.Random(count)
    rows = [
        {
            "partition": i % partitions, "offset": i // partitions, "payload": NUMBER.pack(i),
            "publish_time": EVENT + dt.timedelta(seconds=seconds * i / count),
            "key": b"k%d" % (i % 5), "attributes": [("n", str(i))] if i % 4 == 0 else [],
        }
        for i in range(count)
    ]  # fmt: skip
    chunks = [rows[at : at + count // 7] for at in range(0, count, count // 7)]
    chunks.append(rows[:50])  # as of an export that was cut short
    chance.shuffle(chunks)
    for number, chunk in enumerate(chunks):
        table = pa.Table.from_pylist(chunk, schema=SCHEMA)
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=row_group)
    (folder / "_part.parquet").write_bytes(b"of another tool")
    return folder


SCHEMA = pa.schema([
    ("partition", pa.int32()), ("offset", pa.int64()), ("payload", pa.binary()),
    ("publish_time", pa.timestamp("us", tz="UTC")), ("key", pa.binary()),
    ("attributes", pa.map_(pa.string(), pa.string())),
])  # fmt: skip


@pytest.mark.parametrize("kind", ["table", "topic"])
def test_a_killed_replay_goes_on_behind_what_was_acked(
    filled: Broker, make_target: Any, tmp_path: Path, kind: str
) -> None:
    """Three kills, each behind messages that the run before had not sent; by key, so both sources are merged."""
    target = make_target(partitions=3)
    source, speed, count = SOURCE, "0.02", COUNT
    if kind == "table":
        source, speed, count = f"parquet:{_table(tmp_path / 'table', COUNT)}", "0.3", COUNT
    words = [
        sys.executable, "-m", "danube_fast.cli.main", "replay", source, target, "--url", filled.url, "--checkpoint",
        str(tmp_path / "records"), "-o", "json",
    ]  # fmt: skip
    with filled.client() as client:
        known = 0
        for _ in range(3):
            _kill_behind(known, [*words, "--speed", speed], lambda: _count(client, target))
            known = _count(client, target)
            assert known < count, "it was done before the kill"
    done = subprocess.run(words, capture_output=True, check=True, timeout=100)
    told = json.loads(done.stdout)
    assert told["messages"] + told["published_before"] == count
    assert told["published_before"] >= known
    after = _rows(filled, target)
    assert _numbers(after) == list(range(count))
    whole = make_target_twin(filled, target)
    _run(filled, source, whole, tmp_path)
    for part in range(3):
        assert after[f"{target}-part-{part}"] == _rows(filled, whole)[f"{whole}-part-{part}"]


class _Stop(Exception):
    """Cuts a run short."""


def test_a_run_goes_on_from_its_record_and_passes_over_what_came_behind(
    filled: Broker, make_target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written every 0.2 s of 2 s; runs are cut short between two of them."""
    monkeypatch.setattr(run_module, "SAVE_NS", SECOND_NS // 5)
    target = make_target(partitions=3)
    source = f"parquet:{_table(tmp_path / 'table', 1400)}"
    known, places = 0, [0]
    for naps in (250, 330, 410, 20):
        clock = _SleepingClock()

        def sleep(seconds: float, clock: _SleepingClock = clock, naps: int = naps) -> None:
            clock.sleep(seconds)
            if len(clock.naps) == naps:
                raise _Stop

        with pytest.raises(_Stop):
            _run(filled, source, target, tmp_path, speed=1.0, clock=clock, sleep=sleep)
        (path,) = tmp_path.glob("*.json")
        record = json.loads(path.read_bytes())
        places.append(sum(place["next_position"] for place in record["places"]))
        with filled.client() as client:
            known, before = _count(client, target), known
        assert before < known < 1400
        assert sum(record["sent"]) <= known
    assert places[1] < places[2] < places[3] == places[4] < known
    done = _run(filled, source.replace(":", ":/."), target, tmp_path)  # the same, written otherwise
    assert (done.messages, done.skipped) == (1400 - known, known)
    after = _rows(filled, target)
    assert _numbers(after) == list(range(1400))
    for key in range(5):
        of_key = [row[0] for some in after.values() for row in some if row[1] == b"k%d" % key]
        assert of_key == list(range(key, 1400, 5))


def test_a_replay_with_a_hole_is_not_gone_on_with(
    filled: Broker, make_target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()

    def refuse(box: Any) -> int:
        raise PermissionDenied("not this one") if box.count else AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(run_module._Outbox, "send", refuse)
        with pytest.raises(PermissionDenied, match="another --id"):
            _run(filled, SOURCE, target, tmp_path)
    with pytest.raises(FailedPrecondition, match="some behind it may have been taken"):
        _run(filled, SOURCE, target, tmp_path)
    assert _run(filled, SOURCE, target, tmp_path, replay_id="other").messages == COUNT


def _kill_behind(known: int, words: list[str], count: Callable[[], int]) -> None:
    """Run a command, and kill it as soon as there are more messages than known before."""
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_until("messages of the run", lambda: count() > known or run.poll() is not None)
        is_running = run.poll() is None
    finally:
        run.send_signal(signal.SIGKILL)
        _, said = run.communicate()
    assert is_running, said


def make_target_twin(broker: Broker, target: str) -> str:
    """Make a topic for a replay that nothing kills."""
    with broker.client() as client:
        client.admin.create_topic(twin := f"{target}-twin", partitions=3)
        client.admin.set_topic_policy(twin, {"retention_policy": "forever"})
    return twin


# ---------------------------------------------------------------- pace and order


class _SleepingClock(VirtualClock):
    """A clock that goes on only while one sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.naps: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Go on by so much."""
        self.naps.append(seconds)
        self.now_ns += int(seconds * SECOND_NS)


@pytest.mark.parametrize(("speed", "seconds"), [(10.0, 0.2), (1.0, 2.0), (None, 0.0)])
def test_the_pace_is_that_of_the_times(
    filled: Broker, make_target: Any, tmp_path: Path, speed: float | None, seconds: float
) -> None:
    clock = _SleepingClock()
    table = _table(tmp_path / "table", 700)
    done = _run(
        filled, f"parquet:{table}", make_target(), tmp_path, speed=speed, clock=clock, sleep=clock.sleep
    )  # fmt: skip
    assert done.messages == 700
    assert seconds * 0.99 <= done.seconds <= seconds * 1.02
    assert len(clock.naps) >= (100 if speed else 0)


def _streams(rows: Sequence[Sequence[int]], sizes: Callable[[], int]) -> list[Stream]:
    def blocks(times: Sequence[int]) -> Iterator[Block]:
        at, last = 0, NO_TIME
        while at < len(times):
            some = list(times[at : at + sizes()])
            batch = pa.record_batch(
                {
                    "payload": pa.array([b""] * len(some), pa.binary()),
                    "publish_time": pa.array(some, pa.timestamp("us")),
                }
            )
            block = Block.of(batch, np.arange(at, at + len(some)), "publish_time", last)
            last = int(block.times[-1])
            yield block
            at += len(some)

    return [Stream(number, blocks(times), 0, NO_TIME) for number, times in enumerate(rows)]


def _order(streams: list[Stream]) -> list[tuple[int, int]]:
    found = []
    for piece in merged(streams):
        assert piece.start < piece.stop
        found += [
            (piece.stream.partition, int(position))
            for position in piece.block.positions[piece.start : piece.stop]
        ]
    return found


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 20), max_size=25), max_size=4),
    sizes=st.lists(st.integers(1, 9), min_size=1),
)
def test_the_order_is_one_of_the_rows_alone(rows: list[list[int]], sizes: list[int]) -> None:
    """However they come in blocks: by the highest time up to there, then by stream."""
    chance = random.Random(0)
    expected = sorted(
        (max(times[: at + 1]), number, at)
        for number, times in enumerate(rows)
        for at in range(len(times))
    )
    wanted = [(number, at) for _, number, at in expected]
    assert _order(_streams(rows, lambda: chance.choice(sizes))) == wanted
    assert _order(_streams(rows, lambda: 1000)) == wanted


# ---------------------------------------------------------------- tables


def test_a_table_by_partition_and_offset(filled: Broker, make_target: Any, tmp_path: Path) -> None:
    table = _table(tmp_path / "table", COUNT)
    target = make_target(partitions=2)
    assert _run(filled, f"parquet:{table}", target, tmp_path).messages == COUNT
    after = _rows(filled, target)
    for part in range(2):
        some = after[f"{target}-part-{part}"]
        assert [row[0] for row in some] == list(range(part, COUNT, 2))
        assert all(key == b"k%d" % (number % 5) for number, key, _, _ in some)
        assert [bool(pairs) for _, _, pairs, _ in some] == [row[0] % 4 == 0 for row in some]


def test_a_table_of_payloads_alone_has_the_order_of_its_files(
    filled: Broker, make_target: Any, tmp_path: Path
) -> None:
    for number in range(2):
        payloads = [NUMBER.pack(100 * number + i) for i in range(100)]
        pq.write_table(pa.table({"payload": payloads}), tmp_path / f"{number}.parquet")
    target = make_target()
    assert _run(filled, f"parquet:{tmp_path}", target, tmp_path / "records").messages == 200
    assert [row[0] for row in _rows(filled, target)[target]] == list(range(200))
    with pytest.raises(InvalidArgument, match="no column event_time"):
        _run(filled, f"parquet:{tmp_path}", target, tmp_path, speed=1.0, by="event_time")
    pq.write_table(pa.table({"payload": [b"more"]}), tmp_path / "2.parquet")
    with pytest.raises(DataLoss, match=r"is not what the replay .* began with"):
        _run(filled, f"parquet:{tmp_path}", target, tmp_path / "records")


@pytest.mark.parametrize(
    ("source", "options", "kind", "text"),
    [
        ("/default/nothing", {}, NotFound, "/default/nothing does not exist"),
        ("parquet:/no/such", {}, NotFound, "no Parquet files"),
        ("parquet:/no/such", {"start": "5"}, InvalidArgument, "--start is for topics"),
        (SOURCE, {"speed": 0.0}, InvalidArgument, "above 0"),
        (SOURCE, {"start": "100", "end": "50"}, InvalidArgument, "lies behind --end 50"),
        (SOURCE, {"by": "offset"}, InvalidArgument, "publish_time or event_time"),
        (SOURCE, {"replay_id": "../x"}, InvalidArgument, "no id of a replay"),
        ("/default/brief", {}, FailedPrecondition, "not in a log"),
    ],
)
def test_what_cannot_be(
    filled: Broker, make_target: Any, tmp_path: Path,
    source: str, options: dict[str, Any], kind: type[DanubeError], text: str,
) -> None:  # fmt: skip
    target = make_target()
    if source == "/default/brief":
        with filled.client() as client:
            client.admin.create_topic(source, durability="memory")
    with pytest.raises(kind, match=text):
        _run(filled, source, target, tmp_path, **options)


def test_a_target_that_is_missing_or_the_source_itself(filled: Broker, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="danube-fast topics create /default/none"):
        _run(filled, SOURCE, "/default/none", tmp_path)
    with pytest.raises(InvalidArgument, match="give --end latest if that is meant"):
        _run(filled, SOURCE, SOURCE, tmp_path)
    with filled.client() as client:
        keep_for_ever(client, "/default/itself")
        with client.producer("/default/itself") as producer:
            producer.send_many([NUMBER.pack(i) for i in range(100)])
    done = _run(filled, "/default/itself", "/default/itself", tmp_path, end="latest")
    assert done.messages == 100
    rows = _rows(filled, "/default/itself")["/default/itself"]
    assert [row[0] for row in rows] == [*range(100), *range(100)]


def test_an_id_belongs_to_one_replay(filled: Broker, make_target: Any, tmp_path: Path) -> None:
    target = make_target()
    ids = {"replay_id": "mine"}
    dry = _run(filled, SOURCE, target, tmp_path, is_dry=True, **ids)
    assert (dry.messages, sum(each["end"] for each in dry.ranges)) == (0, COUNT)
    assert _run(filled, SOURCE, target, tmp_path, **ids).messages == COUNT
    with pytest.raises(InvalidArgument, match="replay mine was another one: start is 5"):
        _run(filled, SOURCE, target, tmp_path, start="5", **ids)
    with pytest.raises(FailedPrecondition, match=r"its record .* is not here"):
        _run(filled, SOURCE, target, tmp_path / "elsewhere", **ids)
    assert _run(filled, SOURCE, target, tmp_path, replay_id="other").messages == COUNT
    with filled.client() as client:
        client.admin.delete_topic(target)
        client.admin.create_topic(target)
    with pytest.raises(InvalidArgument, match="the target was made again"):
        _run(filled, SOURCE, target, tmp_path, **ids)


def test_a_target_that_keeps_nothing_counts_nothing(
    filled: Broker, make_target: Any, tmp_path: Path
) -> None:
    target = make_target(dispatch="non_reliable")
    for _ in range(2):
        done = _run(filled, SOURCE, target, tmp_path)
        assert (done.messages, done.is_resumable) == (COUNT, False)
    assert not list(tmp_path.iterdir())


def test_the_command(filled: Broker, make_target: Any, tmp_path: Path, capfdbinary: Any) -> None:
    target = make_target(partitions=2)
    words = ["replay", SOURCE, target, "--url", filled.url, "--checkpoint", str(tmp_path)]
    assert main([*words, "--dry-run"]) == 0
    assert b"would publish about 3,000 messages" in capfdbinary.readouterr().out
    assert main([*words, "--start", "latest"]) == 0
    assert b"has nothing in this range" in capfdbinary.readouterr().out
    assert main(words) == 0
    assert b"3,000 messages (23.4 KiB)" in capfdbinary.readouterr().out
    assert main([*words, "-o", "json"]) == 0
    told = json.loads(capfdbinary.readouterr().out)
    assert (told["messages"], told["published_before"], told["routing"]) == (
        0,
        COUNT,
        "by partition",
    )
    assert main(["replay", "/default/nothing", target, "--url", filled.url]) == 3
    assert capfdbinary.readouterr().err.startswith(b"danube-fast: ")
