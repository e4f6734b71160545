"""Every error that danube-fast raises, and its code on the wire.

    DanubeError
    +-- InvalidArgument      3   the request can never succeed as it is
    +-- DeadlineExceeded     4   the time was up; the outcome may be unknown
    +-- NotFound             5   no such topic, subscription, offset, ...
    +-- AlreadyExists        6   it is there already, or was accepted before
    +-- PermissionDenied     7   the caller may not do this
    +-- ResourceExhausted    8   a quota, a disk, a window is full
    +-- FailedPrecondition   9   right request, wrong state
    |   +-- TopicDeleted    35   the topic went away under a producer or consumer
    |   +-- ProducerFenced  34   a newer producer of the same name took over
    +-- Internal            13   a fault in the broker or below it
    +-- Unavailable         14   cannot be reached just now; try again
    |   +-- NotOwner        36   the partition is on another worker: look it up again
    +-- DataLoss            15   bytes that were there are not

Codes are those of gRPC where gRPC has one. Each message says what to do next.
"""

from __future__ import annotations

import enum
import json
from typing import ClassVar

__all__ = [
    "AlreadyExists",
    "DanubeError",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "NotOwner",
    "PermissionDenied",
    "ProducerFenced",
    "ResourceExhausted",
    "Status",
    "TopicDeleted",
    "Unavailable",
    "error_from_code",
    "failure_line",
]


class DanubeError(Exception):
    """Base of every error here. `code` is the number that stands on the wire."""

    code: ClassVar[int] = 2


class InvalidArgument(DanubeError):
    """The request can never succeed as it is; change it."""

    code = 3


class DeadlineExceeded(DanubeError, TimeoutError):
    """The time was up. What was asked for may or may not have happened."""

    code = 4


class NotFound(DanubeError):
    """The thing that was named does not exist."""

    code = 5


class AlreadyExists(DanubeError):
    """The thing exists already, or the message was accepted too long ago to name its offset."""

    code = 6


class PermissionDenied(DanubeError):
    """The caller may not do this."""

    code = 7


class ResourceExhausted(DanubeError):
    """A limit was reached; the text names it and what frees it."""

    code = 8


class FailedPrecondition(DanubeError):
    """The request is right but the state is not."""

    code = 9


class TopicDeleted(FailedPrecondition):
    """The topic was deleted while this producer or consumer was open."""

    code = 35


class ProducerFenced(FailedPrecondition):
    """A newer producer of the same name took over."""

    code = 34


class Internal(DanubeError):
    """A fault in the broker or in what it stands on."""

    code = 13


class Unavailable(DanubeError, ConnectionError):
    """The broker, or the part of it that is needed, cannot be reached just now."""

    code = 14


class NotOwner(Unavailable):
    """The worker does not own the partition, or not any more; look the topic up again."""

    code = 36


class DataLoss(DanubeError):
    """Bytes that were there are gone or damaged."""

    code = 15


class Status(enum.IntEnum):
    """Outcome of one frame of a PUBLISH. The codes of errors are outcomes too."""

    OK = 0
    """Accepted; the offset is that of the frame's first message."""
    DUPLICATE = 1
    """Accepted before; the offset is the original one."""
    OUT_OF_SEQUENCE = 32
    """An earlier frame of this producer is missing; send from that one on again."""
    NO_SESSION = 33
    """The broker does not know this connection; say HELLO first."""
    FENCED = ProducerFenced.code
    """A newer producer of the same name took over."""
    TOPIC_DELETED = TopicDeleted.code
    """The topic was deleted."""
    NOT_OWNER = NotOwner.code
    """This worker does not own the partition; look the topic up again."""
    THROTTLED = 37
    """The topic's publish rate is used up: send again, from this frame on, in `offset` milliseconds."""


def _tree(root: type[DanubeError]) -> list[type[DanubeError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _tree(child))]


_BY_CODE = {kind.code: kind for kind in _tree(DanubeError)}


def failure_line(name: str, text: str) -> str:
    """One line of JSON for programs that read stderr: error name, what failed, what to do."""
    message, _, remedy = " ".join(text.split()).partition("; ")
    failure = {"code": name, "message": message, "remedy": remedy}
    return json.dumps({"error": failure}, ensure_ascii=False, separators=(",", ":"))


def error_from_code(code: int, text: str) -> DanubeError:
    """The error for a code that came over the wire; an unknown code becomes `Internal`."""
    kind = _BY_CODE.get(code)
    if kind is None:
        return Internal(f"{text} (unknown error code {code}; the broker is newer than this client)")
    return kind(text)
