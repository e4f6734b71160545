"""Brings what a caller hands over for packing into the form that the packers read.

Payloads and keys stay the caller's lists: the packers read the `bytes` objects where they are.
Attributes are flattened into two lists of UTF-8 bytes with running totals of pairs; times become
int64 arrays with a u8 per message that says whether one is there.

A `Columns` serves many frames: make it once for all messages, then call `pack_columns_into` until
everything is packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from danube_fast.errors import InvalidArgument
from danube_fast.frame.cpython import BYTES_TYPE, NONE, OBJECTS_READABLE
from danube_fast.frame.pack_kernels import (
    JOB_ATTRIBUTE_KEYS,
    JOB_ATTRIBUTE_VALUES,
    JOB_BYTES_TYPE,
    JOB_COUNT,
    JOB_DELIVER_AT,
    JOB_DELIVER_AT_VALID,
    JOB_EVENT_TIME_VALID,
    JOB_EVENT_TIMES,
    JOB_KEYS,
    JOB_NONE,
    JOB_PAIR_TOTALS,
    JOB_PAYLOADS,
    JOB_WORDS,
)

__all__ = ["Attributes", "Columns", "OneMessage", "Times", "array_address", "as_items", "as_list"]

Attributes = Sequence[Mapping[str, str] | None]
"""Attributes per message; None and an empty mapping mean the same."""
Times = Sequence[int | None]
"""Nanoseconds since the Unix epoch per message (an int64 ndarray is taken as it is)."""

_INT64 = np.dtype(np.int64)
_WORD = 8
_OPTIONAL = JOB_KEYS, JOB_PAIR_TOTALS, JOB_EVENT_TIMES, JOB_DELIVER_AT
_KEYS, _PAIR_TOTALS, _EVENT_TIMES, _DELIVER_AT = (word // _WORD for word in _OPTIONAL)


def _wrong_type(what: str, index: int, value: object, wanted: str) -> InvalidArgument:
    """The error for a value of a type that cannot be packed."""
    return InvalidArgument(f"{what} {index} is {type(value).__name__}; it must be {wanted}")


def array_address(array: np.ndarray[Any, Any]) -> int:
    """Address of the first element. The caller keeps the array alive."""
    return int(array.__array_interface__["data"][0])


def as_list(values: Any, what: str) -> list[Any]:
    """The caller's own list, or a new one of what it gave. Items are not looked at."""
    if type(values) is list:
        return values
    if isinstance(values, bytes | bytearray | memoryview | str):
        raise InvalidArgument(f"{what}s are one {type(values).__name__}; give a list of bytes")
    if not isinstance(values, Iterable):
        raise InvalidArgument(f"{what}s are {type(values).__name__}; give a list of bytes")
    return list(values)


def as_items(values: Any, what: str) -> list[Any]:
    """A plain list of exact `bytes` and None: the caller's own list if it is one already.

    Subclasses of bytes are copied into bytes. Raises InvalidArgument for any other type.
    """
    values = as_list(values, what)
    if all(value is None or type(value) is bytes for value in values):
        return values  # type: ignore[no-any-return]
    items = []
    for index, value in enumerate(values):
        if value is not None and not isinstance(value, bytes):
            raise _wrong_type(what, index, value, "bytes or None")
        items.append(None if value is None else bytes(value))
    return items


def _flatten(attributes: Attributes, count: int) -> tuple[Any, list[bytes], list[bytes]]:
    """(running totals of pairs, all keys, all values)."""
    keys: list[bytes] = []
    values: list[bytes] = []
    totals = np.zeros(count + 1, dtype=_INT64)
    for index, pairs in enumerate(attributes):
        if pairs:
            try:
                for key, value in pairs.items():
                    keys.append(key.encode())
                    values.append(value.encode())
            except (AttributeError, UnicodeEncodeError):
                raise InvalidArgument(
                    f"attributes {index} must map str to str, both valid Unicode: {pairs!r:.200}"
                ) from None
        totals[index + 1] = len(keys)
    return totals, keys, values


def _times(times: Times | np.ndarray[Any, Any], what: str) -> tuple[Any, Any]:
    """(int64 array, u8 array of what is there or None if all are)."""
    if isinstance(times, np.ndarray):
        if times.dtype != _INT64 or times.ndim != 1:
            raise InvalidArgument(f"{what} as an array must be int64[n], not {times.dtype}")
        return np.ascontiguousarray(times), None
    kinds = set(map(type, times))
    if not kinds <= {int, type(None)}:
        for index, time in enumerate(times):
            if time is not None and type(time) is not int:
                raise _wrong_type(what, index, time, "int (nanoseconds) or None")
    try:
        if type(None) not in kinds:
            return np.array(times, dtype=_INT64), None
        values = np.array([0 if time is None else time for time in times], dtype=_INT64)
    except OverflowError:
        raise InvalidArgument(f"{what} must be nanoseconds below 2**63") from None
    return values, np.array([time is not None for time in times], dtype=np.uint8)


class Columns:
    """The columns of messages that are to be packed. Holds on to all it was given.

    Raises InvalidArgument, naming index and type, for what cannot be packed.
    """

    __slots__ = (
        "attribute_keys",
        "attribute_values",
        "count",
        "deliver_at",
        "deliver_at_valid",
        "event_time_valid",
        "event_times",
        "job",
        "job_address",
        "keys",
        "pair_totals",
        "payloads",
    )

    def __init__(
        self,
        payloads: Sequence[bytes | None],
        *,
        keys: Sequence[bytes | None] | None = None,
        attributes: Attributes | None = None,
        event_times: Times | np.ndarray[Any, Any] | None = None,
        deliver_at: Times | np.ndarray[Any, Any] | None = None,
    ) -> None:
        self.payloads = as_list(payloads, "payload")
        self.count = len(self.payloads)
        for what, column in (
            ("keys", keys),
            ("attributes", attributes),
            ("event_times", event_times),
            ("deliver_at", deliver_at),
        ):
            if column is not None and len(column) != self.count:
                raise InvalidArgument(
                    f"{what} has {len(column)} entries for {self.count} payloads; give one each"
                )
        self.keys: Any = None if keys is None else as_list(keys, "key")
        self.pair_totals: Any = None
        self.attribute_keys: list[bytes] = []
        self.attribute_values: list[bytes] = []
        if attributes is not None:
            flat = _flatten(attributes, self.count)
            self.pair_totals, self.attribute_keys, self.attribute_values = flat
        self.event_times: Any = None
        self.event_time_valid: Any = None
        if event_times is not None:
            self.event_times, self.event_time_valid = _times(event_times, "event_time")
        self.deliver_at: Any = None
        self.deliver_at_valid: Any = None
        if deliver_at is not None:
            self.deliver_at, self.deliver_at_valid = _times(deliver_at, "deliver_at")
        self.job = np.zeros(JOB_WORDS, dtype=_INT64)
        self.job_address = array_address(self.job)
        if OBJECTS_READABLE:
            self._fill_job()
        else:
            self.verify()

    def verify(self) -> None:
        """Look at the type of every payload and key. Kernels do so themselves and call this when
        they meet something else than bytes: subclasses are copied, the rest is InvalidArgument."""
        self.payloads = as_items(self.payloads, "payload")
        if self.keys is not None:
            self.keys = as_items(self.keys, "key")
        self._fill_job()

    def _fill_job(self) -> None:
        words = {
            JOB_BYTES_TYPE: BYTES_TYPE,
            JOB_NONE: NONE,
            JOB_COUNT: self.count,
            JOB_PAYLOADS: id(self.payloads),
        }
        if self.keys is not None:
            words[JOB_KEYS] = id(self.keys)
        if self.pair_totals is not None:
            words[JOB_PAIR_TOTALS] = array_address(self.pair_totals)
            words[JOB_ATTRIBUTE_KEYS] = id(self.attribute_keys)
            words[JOB_ATTRIBUTE_VALUES] = id(self.attribute_values)
        for word, array in (
            (JOB_EVENT_TIMES, self.event_times),
            (JOB_EVENT_TIME_VALID, self.event_time_valid),
            (JOB_DELIVER_AT, self.deliver_at),
            (JOB_DELIVER_AT_VALID, self.deliver_at_valid),
        ):
            if array is not None:
                words[word] = array_address(array)
        for word, value in words.items():
            self.job[word // _WORD] = value


class OneMessage(Columns):
    """Columns for one message after the other, made once. One thread at a time."""

    __slots__ = ("_addresses", "_words")

    def __init__(self) -> None:
        super().__init__([None], keys=[None], attributes=[None], event_times=[0], deliver_at=[0])
        self._words = self.job.data
        self._addresses = tuple(self._words[word // _WORD] for word in _OPTIONAL)

    def hold(
        self,
        payload: bytes | None,
        key: bytes | None,
        attributes: Mapping[str, str] | None,
        event_time: int | None,
        deliver_at: int | None,
    ) -> None:
        """Be the columns of this message, whose fields were checked."""
        words = self._words
        keys, pair_totals, event_times, due_times = self._addresses
        self.payloads[0], self.keys[0] = payload, key
        words[_KEYS] = 0 if key is None else keys
        words[_PAIR_TOTALS] = 0
        if attributes:
            self.attribute_keys[:] = map(str.encode, attributes)
            self.attribute_values[:] = map(str.encode, attributes.values())
            self.pair_totals[1] = len(attributes)
            words[_PAIR_TOTALS] = pair_totals
        words[_EVENT_TIMES] = words[_DELIVER_AT] = 0
        if event_time is not None:
            self.event_times[0], words[_EVENT_TIMES] = event_time, event_times
        if deliver_at is not None:
            self.deliver_at[0], words[_DELIVER_AT] = deliver_at, due_times
