"""A replay: rows of a source, in one order, published to a topic; a run that was killed is gone on with, exactly.

    source --blocks--> merged --pieces--> pace --> outbox of each partition --> a producer `replay-ID` on each

Partition i goes to partition i if source and target have equally many; else rows go by key, as those of producers do,
and without a key by their place. What the target has of this replay its producers say (`next_sequence`): so many rows of
each partition are passed over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from danube_fast.client.client import Client
from danube_fast.client.entry import connect as connect_client
from danube_fast.client.producer import Producer
from danube_fast.clock import SECOND_NS, Clock, SystemClock
from danube_fast.errors import (
    DanubeError,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ProducerFenced,
    TopicDeleted,
)
from danube_fast.spark.options import ReadOptions
from danube_fast.spark.replay.pace import Pace
from danube_fast.spark.replay.record import (
    Place,
    Record,
    default_folder,
    default_id,
    load,
    path_of,
    save,
)
from danube_fast.spark.replay.rows import NO_TIME, Piece, Stream, merged, targets_by_key
from danube_fast.spark.replay.sources import TABLE_MARK, Source, TableSource, TopicSource
from danube_fast.types import parse_topic

__all__ = ["Outcome", "Replay", "replay"]

SEND_ROWS = 4096
"""Handed to a producer at once."""
SAVE_NS = 5 * SECOND_NS
"""How often the record is written."""
FLUSH_SECONDS = 60.0
AWAY_SECONDS = 3600.0
"""So long a broker may be away. A message that is given up then could leave a hole before others."""
NAME = "replay-{}"
"""Of the producers."""

Connect = Callable[[str | None], Client]
OnProgress = Callable[[int, int, int], None]
"""Told rows gone through, rows in all, about, and bytes published."""


class Replay(NamedTuple):
    """What is asked for."""

    source: str
    """A topic, or parquet:DIR."""
    target: str
    start: str | None = None
    end: str | None = None
    speed: float | None = None
    """So many times as fast as it was; None: as fast as it goes."""
    by: str = "publish_time"
    """The column with the times."""
    replay_id: str | None = None
    url: str | None = None
    """Of the broker that has the source."""
    to_url: str | None = None
    """Of the one that has the target; None: the same."""
    store: str | None = None
    checkpoint: Path | None = None
    """Folder for the record."""
    is_dry: bool = False


class Outcome(NamedTuple):
    """What became of it."""

    replay_id: str
    messages: int
    """Published by this run."""
    byte_count: int
    seconds: float
    skipped: int
    """Published by runs before."""
    is_resumable: bool
    is_by_key: bool
    ranges: list[dict[str, int]]
    """By partition of the source: what is read."""
    is_done: bool


def replay(
    asked: Replay, *, connect: Connect = connect_client, connect_target: Connect | None = None,
    on_progress: OnProgress | None = None, clock: Clock | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:  # fmt: skip
    """Publish to `asked.target` what the source has; what this run has done. `connect_target`: opens the client of the
    target's broker, where another way in is needed there.

    Raises InvalidArgument, NotFound for a source or target that is not there, FailedPrecondition for a topic without
    history or a target that has forgotten what it had, DataLoss, and what broker and store raise.
    """
    _check(asked)
    asked = asked._replace(source=_whole_name(asked.source))
    with contextlib.ExitStack() as at_end:
        source = _open_source(asked, connect, at_end)
        client = at_end.enter_context((connect_target or connect)(asked.to_url or asked.url))
        target = _Target.look(client, str(parse_topic(asked.target)))
        if not asked.end and not asked.source.startswith(TABLE_MARK):
            _refuse_same(asked, target, connect, source)
        run = _Run(asked, source, target, clock or SystemClock(), sleep, on_progress)
        return run.dry() if asked.is_dry else run.run(client)


def _check(asked: Replay) -> None:
    if asked.speed is not None and not 0 < asked.speed < float("inf"):
        raise InvalidArgument(f"--speed is {asked.speed:g}; give a number above 0, such as 10")
    if asked.by not in ("publish_time", "event_time"):
        raise InvalidArgument(f"--by is {asked.by!r:.40}; give publish_time or event_time")


def _whole_name(source: str) -> str:
    """Name a source in one way, however it is written: the id of a replay depends on it. Raises InvalidArgument."""
    if source.startswith(TABLE_MARK):
        return f"{TABLE_MARK}{Path(source.removeprefix(TABLE_MARK)).resolve()}"
    return str(parse_topic(source))


def _open_source(asked: Replay, connect: Connect, at_end: contextlib.ExitStack) -> Source:
    if not asked.source.startswith(TABLE_MARK):
        given = {
            "topic": asked.source, "url": asked.url, "store": asked.store, "start": asked.start,
            "end": asked.end,
        }  # fmt: skip
        options = ReadOptions.parse({name: value for name, value in given.items() if value})
        if len(options.topics) != 1:
            raise InvalidArgument("name one topic as the source; replay several one by one")
        start, end = options.start, options.end
        if isinstance(start, int) and isinstance(end, int) and start > end:
            raise InvalidArgument(
                f"--start {start} lies behind --end {end}; nothing is between them"
            )
        return at_end.enter_context(TopicSource.open(options, connect))
    for name, value in (("--start", asked.start), ("--end", asked.end), ("--store", asked.store)):
        if value:
            raise InvalidArgument(f"{name} is for topics; a table is replayed whole: leave it out")
    table = TableSource(Path(asked.source.removeprefix(TABLE_MARK)))
    if asked.speed is not None and not table.has(asked.by):
        raise InvalidArgument(
            f"the table has no column {asked.by}, so it has no pace; leave --speed out, or choose another --by"
        )
    return table


class _Target(NamedTuple):
    """The topic that is published to."""

    topic: str
    partitions: list[str]
    partition_ids: list[int]
    incarnation: int
    created_ns: int
    is_reliable: bool

    @classmethod
    def look(cls, client: Client, topic: str) -> _Target:
        """Ask the broker for it. Raises NotFound."""
        try:
            found = client.admin.describe_topic(topic)
        except NotFound:
            raise NotFound(
                f"the target {topic} does not exist; create it with `danube-fast topics create {topic} --partitions N`"
            ) from None
        placement = found["placement"]
        return cls(
            topic, [each["partition"] for each in placement],
            [each["partition_id"] for each in placement], found["incarnation"],
            found["created_ns"], found["dispatch"] == "reliable",
        )  # fmt: skip


def _refuse_same(asked: Replay, target: _Target, connect: Connect, source: Source) -> None:
    """Raise InvalidArgument for a topic into itself, unless an end was named: it is fixed, but may be a slip."""
    if asked.source != target.topic:
        return
    if asked.url is None and asked.store is not None:
        names = [extent.name for extent in source.extents]
        is_same = names == [
            f"{target.topic} {each} {target.incarnation}" for each in target.partition_ids
        ]
    else:
        with connect(asked.url) as client:
            is_same = _Target.look(client, target.topic) == target
    if is_same:
        raise InvalidArgument(
            f"{target.topic} would get its own messages once more; give --end latest if that is meant"
        )


class _Outbox:
    """Messages on their way to one partition."""

    def __init__(self, skip: int) -> None:
        self.skip = skip
        """So many of the next ones the target has already."""
        self.producer: Producer | None = None
        self._columns: list[list[Any]] = [[], [], [], []]

    @property
    def count(self) -> int:
        """Messages that wait here."""
        return len(self._columns[0])

    def add(self, piece: Piece, rows: Any) -> int:
        """Add rows of a block, by a slice or a list of their indexes; how many the target has not yet."""
        block = piece.block
        count = len(rows)
        gone = min(self.skip, count)
        self.skip -= gone
        rows = rows[gone:]
        for own, column in zip(
            self._columns,
            (block.payloads, block.keys, block.attributes, block.event_times),
            strict=True,
        ):
            if column is None:
                own += [None] * len(rows)
            elif isinstance(rows, range):
                own += column[rows.start : rows.stop]
            else:
                own += [column[row] for row in rows]
        return count - gone

    def send(self) -> int:
        """Hand all of them to the producer; their bytes."""
        payloads, *others = self._columns
        if not payloads or self.producer is None:
            return 0
        self._columns = [[], [], [], []]
        names = ("keys", "attributes", "event_times")
        given: dict[str, Any] = {
            name: column
            for name, column in zip(names, others, strict=True)
            if any(value is not None for value in column)
        }
        self.producer.send_many(payloads, **given)
        return sum(len(payload) for payload in payloads if payload)


class _Run:
    """One run of a replay."""

    def __init__(
        self, asked: Replay, source: Source, target: _Target, clock: Clock,
        sleep: Callable[[float], None], on_progress: OnProgress | None,
    ) -> None:  # fmt: skip
        self._asked, self._source, self._target = asked, source, target
        self._clock, self._sleep = clock, sleep
        self._on_progress = on_progress
        start, end = asked.start or "earliest", asked.end or "latest"
        where = asked.to_url or asked.url or ""
        self.replay_id = asked.replay_id or default_id(
            asked.source, start, end, asked.by, target.topic, where
        )
        self._path = path_of(asked.checkpoint or default_folder(), self.replay_id)
        extents = source.extents
        record = Record(
            source=asked.source, start=start, end=end, by=asked.by, target=target.topic,
            partition_ids=target.partition_ids, incarnation=target.incarnation,
            places=[Place(e.name, e.low, e.high, e.low, NO_TIME) for e in extents],
            sent=[0] * len(target.partitions),
        )  # fmt: skip
        known = load(self._path) if target.is_reliable else None
        if known is not None:
            known.check_same(record, self.replay_id)
            if known.is_broken:
                raise _cannot_go_on(self.replay_id)
            names = [extent.name for extent in extents]
            if [place.name for place in known.places] != names:
                raise DataLoss(
                    f"{asked.source} is not what the replay {self.replay_id} began with; give another --id to begin anew"
                )
        self._is_known = known is not None
        self._record = known or record
        self._is_by_key = len(extents) != len(target.partitions)
        self._sent = list(self._record.sent)
        self._messages = self._byte_count = 0
        self._skipped = sum(self._sent)
        self._streams: list[Stream] = []
        self._is_broken = False

    # ------------------------------------------------------------ the run

    def dry(self) -> Outcome:
        """Say what a run would do."""
        return self._outcome(0)

    def run(self, client: Client) -> Outcome:
        """Publish what is left."""
        begun_ns = self._clock.monotonic_ns()
        self._saved_ns = begun_ns
        boxes: list[_Outbox] = []
        try:
            with contextlib.ExitStack() as at_end:
                boxes += self._open(client, at_end)
                if self._target.is_reliable and not self._is_known:
                    save(self._path, self._record)
                self._publish(boxes)
                self._save(boxes, is_done=True)
        except DanubeError as error:
            if not self._messages or not self._target.is_reliable:
                raise
            if self._is_broken:
                with contextlib.suppress(DanubeError):
                    save(self._path, replace(self._record, is_broken=True))
                raise type(error)(f"{error}; {_cannot_go_on(self.replay_id)}") from error
            raise type(error)(
                f"{error}; what was acked before stays: the same command goes on behind it"
            ) from error
        return self._outcome((self._clock.monotonic_ns() - begun_ns) / SECOND_NS)

    def _open(self, client: Client, at_end: contextlib.ExitStack) -> Iterator[_Outbox]:
        """Open a producer on each partition of the target, and see how much it has taken."""
        name = NAME.format(self.replay_id) if self._target.is_reliable else None
        for partition, sent in zip(self._target.partitions, self._record.sent, strict=True):
            producer = client.producer(partition, name=name, timeout=AWAY_SECONDS)
            at_end.callback(_close_quietly, producer)
            taken = producer.next_sequence if self._target.is_reliable else 0
            if taken and not self._is_known:
                raise FailedPrecondition(
                    f"{partition} has {taken} messages of a replay {self.replay_id}, and its record {self._path} is not "
                    "here; name its folder with --checkpoint, or give another --id to begin anew"
                )
            if taken < sent:
                raise FailedPrecondition(
                    f"{partition} has forgotten the replay {self.replay_id}: it knows of {taken} messages, and had "
                    f"taken {sent} (producer_expiry_seconds); give another --id to begin anew"
                )
            box = _Outbox(taken - sent)
            box.producer = producer
            yield box

    def _publish(self, boxes: list[_Outbox]) -> None:
        pace = None
        if self._asked.speed is not None:
            pace = Pace(self._asked.speed, self._clock, self._sleep)
        for extent, place in zip(self._source.extents, self._record.places, strict=True):
            extent = extent._replace(low=place.low, high=place.high)
            blocks = self._source.blocks(extent, self._asked.by, place.next_position, place.time_us)
            self._streams.append(
                Stream(extent.partition, blocks, place.next_position, place.time_us)
            )
        for piece in merged(self._streams):
            start = piece.start
            while start < piece.stop:
                stop = piece.stop
                if pace is not None and not any(box.skip for box in boxes):
                    stop = pace.due(piece.block.times, start, stop)
                    if stop == start:
                        self._send(boxes, least=1)
                        self._look_around(boxes)
                        pace.wait(int(piece.block.times[start]))
                        continue
                stop = min(stop, start + SEND_ROWS)
                self._add(boxes, piece._replace(start=start, stop=stop))
                piece.note_gone(stop)
                start = stop
                self._send(boxes, least=SEND_ROWS)
                self._look_around(boxes)
        self._send(boxes, least=1)

    def _add(self, boxes: list[_Outbox], piece: Piece) -> None:
        rows = range(piece.start, piece.stop)
        if not self._is_by_key:
            chosen: list[tuple[int, Any]] = [(piece.stream.partition, rows)]
        elif len(boxes) == 1:
            chosen = [(0, rows)]
        else:
            targets = targets_by_key(piece, len(boxes))
            chosen = [
                (index, (np.flatnonzero(targets == index) + piece.start).tolist())
                for index in np.unique(targets).tolist()
            ]
        for index, some in chosen:
            fresh = boxes[index].add(piece, some)
            self._messages += fresh
            self._skipped += len(some) - fresh
            self._sent[index] += len(some)

    def _send(self, boxes: list[_Outbox], *, least: int) -> None:
        for box in boxes:
            if box.count >= least:
                with self._publishing(ProducerFenced, TopicDeleted):
                    self._byte_count += box.send()

    @contextlib.contextmanager
    def _publishing(self, *ends: type[DanubeError]) -> Iterator[None]:
        """Note an error behind which messages may have been taken: then a count does not tell which ones were. `ends`:
        errors behind which none is."""
        try:
            yield
        except DanubeError as error:
            self._is_broken |= not isinstance(error, ends)
            raise

    # ------------------------------------------------------------ meanwhile

    def _look_around(self, boxes: list[_Outbox]) -> None:
        """Write the record, keep the objects, tell how far it is: each when it is time."""
        if self._on_progress is not None:
            places = self._record.places
            total = sum(place.high - place.low for place in places)
            left = sum(
                place.high - stream.next_position
                for place, stream in zip(places, self._streams, strict=True)
            )
            self._on_progress(total - left, total, self._byte_count)
        if self._clock.monotonic_ns() - self._saved_ns >= SAVE_NS:
            self._save(boxes)
            self._source.keep()

    def _save(self, boxes: list[_Outbox], *, is_done: bool = False) -> None:
        """Wait for all acks, and note that."""
        self._send(boxes, least=1)
        for box in boxes:
            if box.producer is not None:
                with self._publishing(ProducerFenced, TopicDeleted, DeadlineExceeded):
                    box.producer.flush(timeout=FLUSH_SECONDS)
        self._saved_ns = self._clock.monotonic_ns()
        if not self._target.is_reliable:
            return
        if any(box.skip for box in boxes):
            if is_done:
                raise DataLoss(
                    f"{self._target.topic} has more messages of the replay {self.replay_id} than {self._asked.source}; "
                    "give another --id to begin anew"
                )
            return  # the place is one that acks have passed only when nothing is to be passed over
        places = [
            replace(place, next_position=stream.next_position, time_us=stream.time_us)
            for place, stream in zip(self._record.places, self._streams, strict=True)
        ]
        self._record = replace(self._record, places=places, sent=list(self._sent), is_done=is_done)
        save(self._path, self._record)

    def _outcome(self, seconds: float) -> Outcome:
        ranges = [
            {"partition": extent.partition, "start": place.low, "end": place.high}
            for extent, place in zip(self._source.extents, self._record.places, strict=True)
        ]
        return Outcome(
            self.replay_id, self._messages, self._byte_count, seconds, self._skipped,
            self._target.is_reliable, self._is_by_key, ranges, self._record.is_done,
        )  # fmt: skip


def _cannot_go_on(replay_id: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"a message of the replay {replay_id} was refused, and some behind it may have been taken, so it cannot be "
        "gone on with; give another --id to begin anew"
    )


def _close_quietly(producer: Producer) -> None:
    """Close a producer whose messages were flushed, or of which an error was told."""
    with contextlib.suppress(DanubeError):
        producer.close()
