"""Options of a write, as `frame.write.format("danube").option(name, value)` gives them: all of them are text.

| option | what | default |
|---|---|---|
| `topic` | the topic; a missing one is made as a producer makes it | |
| `url` | where the broker listens | `DANUBE_URL`, else `danube://127.0.0.1:6650` |
| `server_key`, `key_file`, `sign_on`, `tls`, `token_file`, `server_uid` | the way into a secured broker | |
| `write_id` | identity of the write: one that is repeated under it publishes nothing twice | of a stream, its query's id |
| `staging` | URL of the store where tasks stage rows | the broker's store |
| `timeoutSeconds` | how long a frame may wait for its ack, such as where a quota is full | 300 |

Names are the same whatever their case, and `writeId` is `write_id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from danube_fast.checks import check_names
from danube_fast.client.values.access import Access
from danube_fast.errors import InvalidArgument
from danube_fast.history.stores.url import parse_store_url
from danube_fast.spark.options import KAFKA_PREFIX, access_of, kafka_only
from danube_fast.types import parse_topic

__all__ = ["ONCE_PREFIX", "STREAM_PREFIX", "WriteOptions", "check_write_id"]

STREAM_PREFIX = "stream-"
"""Of the write id of a stream that was given none; the id of its query follows."""
ONCE_PREFIX = "once-"
"""Of the write id of a batch write that was given none."""

TIMEOUT_SECONDS = 300
TIMEOUT_SECONDS_MAX = 7 * 24 * 3600
_NAMES = ("topic", "url", "write_id", "staging", "timeoutSeconds", "path", *Access._fields)
_OF_SPARK = ("checkpointlocation", "queryname")
"""Options of a stream that Spark hands on."""
_OTHER_NAMES = {"writeid": "write_id"}
_WRITE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,127}")


class WriteOptions(NamedTuple):
    """What a write was told."""

    topic: str
    url: str | None
    access: Access
    write_id: str
    """Empty: none was given."""
    staging: str | None
    timeout_seconds: int

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> WriteOptions:
        """Read the options of a write. Raises InvalidArgument."""
        values = _named(given)
        topic = values.get("topic") or values.get("path") or ""
        if not topic:
            raise InvalidArgument("name the topic: .option('topic', '/default/flights')")
        if "," in topic:
            raise InvalidArgument(f"topic is {topic!r:.200}; a write has one topic")
        staging = values.get("staging")
        if staging is not None and parse_store_url(staging).scheme == "memory":
            raise InvalidArgument(
                "staging is memory://, which each process has for itself; give file:///folder or s3://bucket/prefix"
            )
        return cls(
            topic=str(parse_topic(topic)),
            url=values.get("url"),
            access=access_of(values),
            write_id=check_write_id(values["write_id"]) if "write_id" in values else "",
            staging=staging,
            timeout_seconds=_timeout(values.get("timeoutSeconds", str(TIMEOUT_SECONDS))),
        )


def check_write_id(text: str) -> str:
    """`text` itself. Raises InvalidArgument if it is no write id."""
    if not _WRITE_ID.fullmatch(text):
        raise InvalidArgument(
            f"write_id is {text!r:.200}; give 1 to 128 letters, digits and . _ = -, the first of them no . and no -"
        )
    return text


def _named(given: Mapping[str, str]) -> dict[str, str]:
    """The options by the names that they have here."""
    known = {name.lower(): name for name in _NAMES} | _OTHER_NAMES
    values: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in given.items():
        lower = name.lower()
        if lower.startswith(KAFKA_PREFIX):
            raise kafka_only(name)
        if lower in known:
            own = known[lower]
            if values.setdefault(own, value) != value:
                raise InvalidArgument(
                    f"{own} is {values[own]!r:.200}, and as {name} it is {value!r:.200}; give it once"
                )
        elif lower not in _OF_SPARK:
            unknown.append(name)
    check_names(unknown, _NAMES, "a write to danube")
    return values


def _timeout(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= TIMEOUT_SECONDS_MAX:
        raise InvalidArgument(
            f"timeoutSeconds is {text!r}; give a whole number from 1 to {TIMEOUT_SECONDS_MAX}"
        )
    return int(text)
