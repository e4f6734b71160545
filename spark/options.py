"""Options of the data source, as `spark.read.format("danube").option(name, value)` gives them: all of them are text.

| option | what | default |
|---|---|---|
| `topic` | one topic, or several with commas between them; `topicPattern`: a glob such as `/iot/dev-*` | |
| `url` | where the broker listens, to flush the topic and to hold its objects | `DANUBE_URL`, else `danube://127.0.0.1:6650` |
| `server_key`, `key_file`, `sign_on`, `tls`, `token_file`, `server_uid` | the way into a secured broker: keys that are public, paths of files | |
| `store` | where the history is, if executors reach it by another URL; without `url` only what is there is read | the broker's |
| `start`, `end` | `earliest`, `latest`, an offset, an RFC 3339 time, `-10m`, or JSON by partition: `{"0": 17}` | all |
| `columns` | what is read, with commas between: Spark does not tell a source in Python | all |
| `holdSeconds` | how long objects stay that were planned to be read | 6 hours |
| `snapshot` | of our own jobs: partitions that are flushed and held already, as JSON | |
| `splitBytes`, `minPartitions` | how much one task reads; how many there are at least | 64 MiB |
| `maxMessagesPerTrigger` | of a stream: how many messages a batch has at most | all |
| `failOnDataLoss` | `false`: go on behind what is lost or damaged | `true` |
| `pushdown` | `true`: filters choose what is read, see decision 35; only for a frame that one query uses, once | `false` |

Names are the same whatever their case. Those of Spark's Kafka source are taken, too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from danube_fast.checks import check_names
from danube_fast.client.entry import connect
from danube_fast.client.values.access import Access
from danube_fast.client.values.options import Position, checked_position
from danube_fast.errors import InvalidArgument
from danube_fast.types import TopicPattern, parse_topic

if TYPE_CHECKING:
    from danube_fast.client.client import Client

__all__ = [
    "COLUMNS",
    "KAFKA_PREFIX",
    "HeldPartition",
    "ReadOptions",
    "Where",
    "access_of",
    "hint",
    "kafka_only",
]

MIB = 1024 * 1024
HOLD_SECONDS = 6 * 3600
SPLIT_BYTES = 64 * MIB
SPLIT_BYTES_MIN = 64 * 1024
PARTITIONS_MAX = 1_000_000
HOLD_SECONDS_MAX = 30 * 24 * 3600

COLUMNS = (
    "topic", "offset", "partition", "key", "payload", "attributes", "publish_time", "event_time",
    "producer_name", "sequence",
)  # fmt: skip
"""In the order of a row."""

_KAFKA = {
    "subscribe": "topic",
    "subscribepattern": "topicPattern",
    "maxoffsetspertrigger": "maxMessagesPerTrigger",
    "startingoffsets": "start",
    "endingoffsets": "end",
}
_KAFKA_TIMES = {"startingtimestamp": "start", "endingtimestamp": "end"}
KAFKA_PREFIX = "kafka."
_NAMES = (
    "topic", "topicPattern", "url", "store", "start", "end", "columns", "holdSeconds", "snapshot",
    "splitBytes", "minPartitions", "maxMessagesPerTrigger", "failOnDataLoss", "pushdown", "path",
    *Access._fields,
)  # fmt: skip

Where = Position | dict[int, int]
"""A position, or an offset for each partition by its index."""


class HeldPartition(NamedTuple):
    """A partition whose objects the caller holds, and the offsets that are read of it."""

    topic: str
    partition: int
    partition_id: int
    manifest: int
    """Number of the newest record."""
    low: int
    high: int


class ReadOptions(NamedTuple):
    """What a read was told."""

    topics: tuple[str, ...]
    pattern: str
    """A glob; empty: there is none."""
    url: str | None
    access: Access
    store: str | None
    start: Where
    end: Where
    columns: tuple[str, ...]
    hold_seconds: int
    held: tuple[HeldPartition, ...]
    """What is read, if the caller has flushed it and holds its objects."""
    split_bytes: int
    partitions_min: int
    messages_max: int
    """In a batch of a stream; 0: as many as there are."""
    fails_on_loss: bool
    takes_filters: bool

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> ReadOptions:
        """Read the options of a source. Raises InvalidArgument."""
        values = _named(given)
        text = values.get("topic") or values.get("path") or ""
        topics = tuple(str(parse_topic(name.strip())) for name in text.split(",") if name.strip())
        pattern = values.get("topicPattern", "")
        if bool(topics) == bool(pattern):
            raise InvalidArgument(
                "name what is read, in one way: .option('topic', '/default/flights'), or topicPattern with a glob"
            )
        if pattern:
            TopicPattern(pattern)
        return cls(
            topics=tuple(dict.fromkeys(topics)),
            pattern=pattern,
            url=values.get("url"),
            access=access_of(values),
            store=values.get("store"),
            start=_where(values.get("start", "earliest"), "start", topics),
            end=_where(values.get("end", "latest"), "end", topics),
            columns=_columns(values.get("columns")),
            hold_seconds=_whole(values, "holdSeconds", HOLD_SECONDS, 1, HOLD_SECONDS_MAX),
            held=_held(values.get("snapshot")),
            split_bytes=_whole(values, "splitBytes", SPLIT_BYTES, SPLIT_BYTES_MIN, 1 << 40),
            partitions_min=_whole(values, "minPartitions", 1, 1, PARTITIONS_MAX),
            messages_max=_whole(values, "maxMessagesPerTrigger", 0, 1, 1 << 62),
            fails_on_loss=_is_true(values, "failOnDataLoss", default="true"),
            takes_filters=_is_true(values, "pushdown", default="false"),
        )

    def connect(self) -> Client:
        """Return a client of the broker. Raises as `danube_fast.connect`."""
        return connect(self.url, **self.access.arguments())


def access_of(values: Mapping[str, str]) -> Access:
    """Return the way in that options say. Raises InvalidArgument."""
    access = Access.of(values, lambda name: f"the option {name}")
    if access.tls and not access.sign_on:
        raise InvalidArgument(
            "the option tls is for a sign-on; give the options sign_on and token_file too, or leave it out"
        )
    return access


def _named(given: Mapping[str, str]) -> dict[str, str]:
    """The options by the names that they have here."""
    known = {name.lower(): name for name in _NAMES}
    values: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in given.items():
        lower = name.lower()
        if lower in known:
            values[known[lower]] = value
        elif lower in _KAFKA:
            hint(name, _KAFKA[lower])
            values[_KAFKA[lower]] = value
        elif lower in _KAFKA_TIMES:
            hint(name, _KAFKA_TIMES[lower])
            values[_KAFKA_TIMES[lower]] = _from_milliseconds(name, value)
        elif lower.startswith(KAFKA_PREFIX):
            raise kafka_only(name)
        else:
            unknown.append(name)
    check_names(unknown, _NAMES, "the data source danube")
    return values


def kafka_only(name: str) -> InvalidArgument:
    """Return the error for an option that only Kafka has."""
    return InvalidArgument(
        f"{name} is an option of Kafka's source; give url, such as danube://127.0.0.1:6650"
    )


def hint(given: str, name: str) -> None:
    """Say that a name of Kafka's was taken."""
    warnings.warn(f"{given} is the name that Kafka's source has; here it is {name}", stacklevel=2)


def _from_milliseconds(name: str, value: str) -> str:
    if not value.isdecimal():
        raise InvalidArgument(f"{name} is {value!r}; give milliseconds since 1970")
    return json.dumps({"time_ns": int(value) * 1_000_000})


def _where(text: str, name: str, topics: tuple[str, ...]) -> Where:
    """Read a position, or offsets by partition of the one topic."""
    if not text.startswith("{"):
        return checked_position(int(text) if text.isdecimal() else text)
    example = '{"0": 17, "1": 40}'
    try:
        given: Any = json.loads(text)
        if [*given] == ["time_ns"]:
            return {"time_ns": int(given["time_ns"])}
        if len(given) == 1 and isinstance(inner := next(iter(given.values())), dict):
            if [*given] != [*topics]:  # as Kafka's: {"topic": {"0": 17}}
                raise InvalidArgument(f"{name} names another topic than topic does: {text!r:.200}")
            given = inner
        offsets = {int(index): int(offset) for index, offset in given.items()}
    except (ValueError, TypeError, AttributeError):
        raise InvalidArgument(
            f"{name} is {text!r:.200}; give offsets by partition, such as {example}"
        ) from None
    if len(topics) != 1:
        raise InvalidArgument(f"{name} has offsets by partition, which are of one topic: name one")
    if any(number < 0 for pair in offsets.items() for number in pair):
        raise InvalidArgument(f"{name} is {text!r:.200}; partitions and offsets are 0 or more")
    return offsets


def _held(text: str | None) -> tuple[HeldPartition, ...]:
    try:
        return tuple(HeldPartition(*each) for each in json.loads(text or "[]"))
    except (ValueError, TypeError):
        raise InvalidArgument("snapshot is for jobs of danube-fast itself; leave it out") from None


def _columns(text: str | None) -> tuple[str, ...]:
    if text is None:
        return COLUMNS
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidArgument(f"columns is empty; name some of {', '.join(COLUMNS)}")
    check_names(names, COLUMNS, "columns")
    return names


def _whole(values: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = values.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InvalidArgument(f"{name} is {text!r}; give a whole number from {low} to {high}")
    return int(text)


def _is_true(values: Mapping[str, str], name: str, *, default: str) -> bool:
    text = values.get(name, default).lower()
    if text not in ("true", "false"):
        raise InvalidArgument(f"{name} is {text!r}; give true or false")
    return text == "true"
