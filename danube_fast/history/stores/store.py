"""The interface of every object store: objects under keys, made once, never changed.

History needs little of a store, so that many can be one: create a key that does not exist, read a
range, send a large object in parts, list, delete. Nothing is ever overwritten. Two writers that
create the same key are told apart by the store: exactly one succeeds.

Keys look like `topics/default/flights/0/0000000000000017.delta`: segments of letters, digits and
`.`, `_`, `-`, `=`, `%`, joined by '/'. A prefix is empty or ends in '/'.

All calls are synchronous, may come from any thread, and may wait for the store. Each may raise

    Unavailable          the store cannot be reached or is busy: the same call may succeed later
    PermissionDenied     credentials are missing, wrong, expired, or allow too little
    FailedPrecondition   the bucket, container or folder is not there, an object is archived, a
                         clock is wrong: a person has to do something
    ResourceExhausted    the store is full

with a text that names the store, the key and the cause. One conformance suite,
tests/history/conformance.py, runs over each store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from danube_fast.errors import DataLoss, InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "KEY_BYTES_MAX",
    "PARTS_MAX",
    "ObjectInfo",
    "ObjectStore",
    "Part",
    "RetryingStore",
    "Upload",
    "check_object_key",
    "check_object_prefix",
    "check_parts",
    "check_range",
]

KEY_BYTES_MAX = 700
"""Longest key. S3 allows 1,024 bytes; the rest is for a prefix."""

PARTS_MAX = 10_000
"""Parts of one object, as S3 allows."""

_KEY = re.compile(r"[A-Za-z0-9._=%-]+(/[A-Za-z0-9._=%-]+)*")


class ObjectInfo(NamedTuple):
    """One object, without its bytes."""

    key: str
    size: int
    """Bytes."""
    modified_ns: int
    """When it was made, by the store's clock (Unix time)."""


class Upload(NamedTuple):
    """An object that is sent in parts and does not exist before `complete`."""

    key: str
    upload_id: str


class Part(NamedTuple):
    """One part that the store has."""

    number: int
    """From 1 on, in the order of the object's bytes."""
    offset: int
    """Where it begins in the object, bytes."""
    size: int
    """Bytes."""
    tag: str
    """What the store calls it; `complete` names it again."""


class ObjectStore(Protocol):
    """Objects under keys. See the module for what every method may raise."""

    @property
    def url(self) -> str:
        """Where the store is, fit to be shown: it never holds a secret."""
        ...

    @property
    def part_bytes_min(self) -> int:
        """Smallest part that the store takes, the last one excepted."""
        ...

    def create(self, key: str, data: Buffer) -> None:
        """Make an object, durably. Raises AlreadyExists if there is one, and leaves it as it is."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Tell of one object; None if there is none."""
        ...

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        """Read `count` bytes from `start` on; None: all to the end.

        Raises NotFound if there is no such object, DataLoss if it ends before.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object under `prefix`; those of one folder in the order of their names."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; one that does not exist is no error."""
        ...

    def begin(self, key: str) -> Upload:
        """Begin an object that is sent in parts. What was sent outlives this process."""
        ...

    def put_part(self, upload: Upload, number: int, offset: int, data: Buffer) -> Part:
        """Send one part. A part that is sent again takes the place of the first.

        All but the last have `part_bytes_min` bytes or more, and offsets follow from the sizes.
        Raises NotFound if the upload has ended.
        """
        ...

    def complete(self, upload: Upload, parts: Sequence[Part]) -> None:
        """Make the object of these parts, durably.

        Raises AlreadyExists if the key has an object, NotFound if the upload has ended. After an answer
        that was lost it may raise these, or succeed: then `head` tells what became of it.
        """
        ...

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts; one that has ended is no error."""
        ...

    def uploads(self, prefix: str = "") -> Iterator[tuple[Upload, int]]:
        """Uploads under `prefix` that have not ended, with the time when each began (Unix, ns)."""
        ...

    def close(self) -> None:
        """Give connections back. May be called twice."""
        ...


@runtime_checkable
class RetryingStore(Protocol):
    """A store that can tell of each request that it sends again by itself."""

    on_retry: Callable[[], None]
    """Called at each of them, from any thread; may be replaced."""


def check_object_key(key: str) -> str:
    """`key` itself. Raises InvalidArgument if no store could have it."""
    if len(key) > KEY_BYTES_MAX or not _KEY.fullmatch(key) or "/." in f"/{key}":
        raise InvalidArgument(
            f"{key!r} is not a key of an object; join segments of letters, digits and . _ - = % "
            f"by '/', at most {KEY_BYTES_MAX} bytes"
        )
    return key


def check_object_prefix(prefix: str) -> str:
    """`prefix` itself. Raises InvalidArgument unless it is empty or a key and '/'."""
    if prefix:
        if not prefix.endswith("/"):
            raise InvalidArgument(f"{prefix!r} is not a prefix; it is empty or ends in '/'")
        check_object_key(prefix[:-1])
    return prefix


def check_range(url: str, key: str, size: int, start: int, count: int | None) -> int:
    """How many bytes to read of an object of `size` bytes. Raises DataLoss if it ends before."""
    wanted = size - start if count is None else count
    if start < 0 or wanted < 0 or start + wanted > size:
        raise DataLoss(
            f"{url}: object {key} has {size} bytes, and bytes {start} to {start + wanted} were "
            "asked for: it is not the object that was written"
        )
    return wanted


def check_parts(upload: Upload, parts: Sequence[Part]) -> int:
    """Size of the object of these parts. Raises InvalidArgument unless they follow each other."""
    end = 0
    for number, part in enumerate(parts, 1):
        if part.number != number or part.offset != end:
            raise InvalidArgument(
                f"part {part.number} of {upload.key} begins at {part.offset}, but part {number} "
                f"at {end} comes next"
            )
        end += part.size
    if not 1 <= len(parts) <= PARTS_MAX:
        raise InvalidArgument(
            f"{upload.key} has {len(parts)} parts; 1 to {PARTS_MAX} can be joined"
        )
    return end
