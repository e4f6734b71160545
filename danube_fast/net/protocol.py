"""The wire protocol: every command, its op code and its fields. The prose is in docs/protocol.md.

A command is one msgpack array `[op, field, ...]` in a ZeroMQ part of its own. PUBLISH and DELIVER
carry bundles (see `frame/layout.py`) in the parts behind it. A client speaks DEALER, the broker
ROUTER. A command with a `request` is answered by exactly one reply with the same number, in any
order; `request` 0 in a reply means that it answers no request.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from danube_fast.errors import Status

__all__ = [
    "PROTOCOL_VERSION",
    "Ack",
    "Admin",
    "Bye",
    "ClientCommand",
    "CloseConsumer",
    "CloseProducer",
    "ConsumerEvent",
    "Deliver",
    "Error",
    "EventKind",
    "Extend",
    "Flow",
    "Hello",
    "Lookup",
    "Nack",
    "OpenProducer",
    "OpenProducerUnnamed",
    "Ping",
    "Pong",
    "ProducerNames",
    "Publish",
    "Published",
    "Result",
    "Seek",
    "ServerCommand",
    "Status",
    "Subscribe",
    "Watch",
    "Welcome",
    "decode_client_command",
    "decode_server_command",
    "encode",
    "op_code",
]

PROTOCOL_VERSION = 1


class EventKind(enum.StrEnum):
    """Kinds of CONSUMER_EVENT."""

    CLOSED = "closed"
    """The consumer is gone; `code` and `text` say why."""
    GAP = "gap"
    """Offsets `first` to `last` will never be delivered; `reason` says why."""


class _Command(msgspec.Struct, array_like=True, frozen=True, gc=False, tag_field="op"):
    pass


class _Request(_Command, frozen=True, forbid_unknown_fields=True):
    """A client's command: one with more fields than there are is an error, not half understood."""


# ---------------------------------------------------------------- client to broker


class Hello(_Request, tag=1, frozen=True):
    """Opens or resumes a session. Must be the first command on a connection.

    `host_id` tells whether client and broker share a host; `session` and `token` are 0 and empty
    for a new session, those of WELCOME to resume one.
    """

    request: int
    protocol_version: int
    client_name: str
    auth: dict[str, Any] = {}
    host_id: str = ""
    process_id: int = 0
    session: int = 0
    token: bytes = b""


class Ping(_Request, tag=2, frozen=True):
    """Keeps the session alive; answered by PONG.

    `taken`: for consumers that report (see SUBSCRIBE), [consumer_id, frames, offset]: their application has
    taken the first `frames` of the frames that the consumer was sent, and of the next one all below `offset`.
    """

    request: int
    taken: list[tuple[int, int, int]] = []


class Bye(_Request, tag=3, frozen=True):
    """Ends the session: consumers leave, producers close. Answered by RESULT nil."""

    request: int


class Lookup(_Request, tag=4, frozen=True):
    """Where a topic's partitions are (bootstrap endpoint only).

    `create` is nil, or a map of topic options: create the topic if it is missing.
    `wait_ms` > 0: if the topic is missing, answer when it appears, at the latest then.
    RESULT is a map, see docs/protocol.md.
    """

    request: int
    topic: str
    create: dict[str, Any] | None = None
    wait_ms: int = 0


class Admin(_Request, tag=5, frozen=True):
    """An administrative operation by name (bootstrap endpoint only). RESULT is its answer."""

    request: int
    operation: str
    arguments: dict[str, Any] = {}


class Watch(_Request, tag=6, frozen=True):
    """Tell when topics come, go or get more partitions (bootstrap endpoint only); one for a session.

    `cursor` is that of the last answer, "" at first; `patterns` are globs of topics, each within a
    namespace. RESULT is `{"cursor", "changes": [[kind, topic], ...]}` as soon as there are changes,
    or after `wait_ms`; of topics that match, except that growth is told of all. Behind a cursor
    that is not known (any more) RESULT is `{"cursor", "topics"}`: all that match.
    """

    request: int
    cursor: str = ""
    patterns: list[str] = []
    wait_ms: int = 0


class OpenProducer(_Request, tag=10, frozen=True, repr_omit_defaults=True):
    """Registers a producer on one partition.

    RESULT is `{"producer_id", "producer_epoch", "next_sequence"}`. An older session with the same
    name is fenced, unless it is this session.
    """

    request: int
    partition_id: int
    name: str
    topic: str = ""
    """Name of the partition's topic: who says that of a reply topic has it from a request."""


class OpenProducerUnnamed(_Request, tag=10, frozen=True):
    """OPEN_PRODUCER without its last field, which brokers before it refuse; a client sends this where the topic is no
    reply topic."""

    request: int
    partition_id: int
    name: str


class Publish(_Request, tag=11, frozen=True):
    """One bundle in the next part. Answered by PUBLISHED."""

    request: int


class CloseProducer(_Request, tag=12, frozen=True):
    """Gives a producer up. RESULT nil."""

    request: int
    partition_id: int
    producer_id: int


class Subscribe(_Request, tag=20, frozen=True):
    """Attaches a consumer to one partition's subscription.

    `consumer_id` is chosen by the client, unique in its session. `flow_id` names the credit that
    the consumer draws on, likewise. `type` is exclusive, shared, failover, key_shared or reader (a
    reader has no subscription and acks nothing). `position` is "earliest", "latest", an offset,
    `{"time_ns": t}` (the first message that the broker got at that time or later, nanoseconds since the
    epoch) or `{"ago_ns": n}` (so long before now).
    `options`: `key_filters`, a list of globs (key_shared), `failure_policy`, a map that a new
    subscription begins with, and `reports_taken`: PING and CLOSE_CONSUMER say what was taken. RESULT is `{"next_offset", "end_offset", "first_offset",
    "ack_timeout_ms"}`.
    """

    request: int
    consumer_id: int
    flow_id: int
    partition_id: int
    subscription: str
    type: str
    position: str | int | dict[str, int] = "latest"
    consumer_name: str = ""
    options: dict[str, Any] = {}


class Flow(_Request, tag=21, frozen=True):
    """Grants credit. No reply."""

    flow_id: int
    byte_count: int
    message_count: int


class Ack(_Request, tag=22, frozen=True):
    """Acknowledges offsets: per consumer a flat list of [start, end) pairs, or its bytes as int64.

    Offsets that the consumer does not hold are ignored. With `request` > 0, RESULT nil comes when
    these acks and all before them are durable.
    """

    request: int
    entries: Sequence[tuple[int, list[int] | bytes]]


class Nack(_Request, tag=23, frozen=True):
    """Gives messages back for redelivery: per consumer a flat list of [start, end) pairs.

    They failed: `delay_ms` below 0 leaves it to the subscription's failure policy when they come again.
    """

    entries: list[tuple[int, list[int]]]
    delay_ms: int = 0
    reason: str = ""


class Seek(_Request, tag=24, frozen=True):
    """Moves a subscription to a position, see SUBSCRIBE; an offset beyond the end is the end.

    RESULT `{"next_offset", "end_offset"}`. Other consumers that have received anything are closed
    (`sought`): what they ack from before the seek must not count. `dry_run`: move nothing.
    """

    request: int
    consumer_id: int
    position: str | int | dict[str, int]
    dry_run: bool = False


class CloseConsumer(_Request, tag=25, frozen=True):
    """Detaches a consumer; what it holds goes to others. RESULT nil. `taken`: [frames, offset], as in PING."""

    request: int
    consumer_id: int
    taken: tuple[int, int] | None = None


class Extend(_Request, tag=26, frozen=True):
    """Keeps messages: per consumer a flat list of [start, end) pairs, of which those that it holds stay
    with it for so long from now on; 0: for the subscription's ack timeout. No reply."""

    entries: list[tuple[int, list[int]]]
    milliseconds: int = 0


# ---------------------------------------------------------------- broker to client


class Welcome(_Command, tag=64, frozen=True):
    """The session is open. `limits` holds byte and time limits the client must keep to."""

    request: int
    session: int
    token: bytes
    protocol_version: int
    server_version: str
    host_id: str
    resumed: bool
    limits: dict[str, int]


class Pong(_Command, tag=65, frozen=True):
    """Answers PING."""

    request: int


class Error(_Command, tag=66, frozen=True):
    """A request failed: `code` as in errors.py or Status, `text` says what to do next."""

    request: int
    code: int
    text: str
    detail: dict[str, Any] = {}


class Result(_Command, tag=67, frozen=True):
    """A request succeeded."""

    request: int
    value: Any = None


class Published(_Command, tag=68, frozen=True):
    """Outcome of PUBLISH commands: `[request, [status, offset, status, offset, ...]]`, one pair
    per frame of the bundle in order. `texts` explains each status that is an error."""

    entries: list[tuple[int, list[int]]]
    texts: dict[int, str] = {}


class Deliver(_Command, tag=69, frozen=True):
    """Frames for consumers in the bundles behind it: one consumer id per frame, in order."""

    consumer_ids: list[int]


class ConsumerEvent(_Command, tag=70, frozen=True):
    """Something happened to a consumer, see `EventKind`."""

    consumer_id: int
    kind: str
    detail: dict[str, Any] = {}


class ProducerNames(_Command, tag=71, frozen=True):
    """Names of producers whose frames follow, once per consumer: producer_id -> name."""

    partition_id: int
    names: dict[int, str]


ClientCommand = (
    Hello | Ping | Bye | Lookup | Admin | OpenProducer | Publish | CloseProducer | Subscribe
    | Flow | Ack | Nack | Seek | CloseConsumer | Extend | Watch
)  # fmt: skip
ServerCommand = (
    Welcome | Pong | Error | Result | Published | Deliver | ConsumerEvent | ProducerNames
)

_encoder = msgspec.msgpack.Encoder()
_client_decoder = msgspec.msgpack.Decoder(ClientCommand)
_server_decoder = msgspec.msgpack.Decoder(ServerCommand)

encode = _encoder.encode
"""Command -> bytes of its ZeroMQ part."""


def op_code(command: type[_Command]) -> int:
    """Return the number that stands first in a command, for kernels that write or read it."""
    tag = command.__struct_config__.tag
    if not isinstance(tag, int):
        raise TypeError(f"{command.__name__} has no number")
    return tag


def decode_client_command(data: Any) -> ClientCommand:
    """Bytes -> client command. Raises msgspec.DecodeError or ValidationError on anything else."""
    try:
        command: ClientCommand = _client_decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        # the decoder lets these two through: a str that is no UTF-8, maps nested without end
        raise msgspec.DecodeError(str(error)) from None
    return command


decode_server_command = _server_decoder.decode
"""Bytes -> broker command. Raises msgspec.DecodeError or ValidationError on anything else."""
