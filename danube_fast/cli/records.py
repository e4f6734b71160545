"""Messages as text: what `produce` reads and `consume` writes. Pure functions over bytes.

One JSON form serves both ways: what `consume --output json` prints, `produce --input json` takes.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from danube_fast.checks import in_our_words
from danube_fast.cli.output import time_text
from danube_fast.errors import InvalidArgument

__all__ = ["Record", "formatter", "json_line", "parse_records", "safe_json_line", "topic_of"]

LINE_END = b"\n"


class Record(NamedTuple):
    """One message to publish."""

    payload: bytes | None
    key: bytes | None = None
    attributes: dict[str, str] | None = None
    event_time: int | None = None


# ---------------------------------------------------------------- reading


class _JsonRecord(msgspec.Struct):
    """Fields of a line of `--input json`; others, those of a received message, are ignored."""

    payload: str | None = None
    payload_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    attributes: dict[str, str] | None = None
    event_time: int | None = None


_decode_record = msgspec.json.Decoder(_JsonRecord).decode
_decode_any = msgspec.json.Decoder().decode


def parse_records(
    lines: Iterable[bytes],
    *,
    is_json: bool = False,
    key: str | None = None,
    key_field: str | None = None,
    delimiter: str | None = None,
    attributes: dict[str, str] | None = None,
) -> Iterator[Record]:
    """Return a record for each line. Raises InvalidArgument that names the line that is not right."""
    fixed = None if key is None else key.encode()
    mark = None if delimiter is None else delimiter.encode()
    for number, line in enumerate(lines, 1):
        if is_json:
            record = _from_json(line, number)
        elif mark is not None:
            head, found, rest = line.partition(mark)
            record = Record(rest, head) if found else Record(line)
        elif key_field is not None:
            record = Record(line, _field(line, key_field, number))
        else:
            record = Record(line)
        if fixed is not None:
            record = record._replace(key=fixed)
        if attributes:
            record = record._replace(attributes={**attributes, **(record.attributes or {})})
        yield record


def _from_json(line: bytes, number: int) -> Record:
    try:
        parsed = _decode_record(line)
        if parsed.payload is None and parsed.payload_base64 is None:
            _check_tombstone(_decode_any(line), number)
        payload = _bytes(parsed.payload, parsed.payload_base64)
        key = _bytes(parsed.key, parsed.key_base64)
    except (msgspec.DecodeError, binascii.Error) as error:
        is_json = isinstance(error, msgspec.ValidationError)
        why = in_our_words(error, "the object") if is_json else str(error)
        raise InvalidArgument(
            f"line {number} is no message in JSON ({why}); write an object such as "
            '{"payload": "text", "key": "k"}, as `consume --output json` does'
        ) from error
    return Record(payload, key, parsed.attributes or None, parsed.event_time)


def _check_tombstone(fields: dict[str, Any], number: int) -> None:
    """Raise InvalidArgument where a payload was forgotten: one that is not there deletes a key."""
    if "payload" not in fields and "payload_base64" not in fields:
        raise InvalidArgument(
            f"line {number} has no field 'payload' (its fields: {', '.join(fields) or 'none'}); write "
            '"payload": null for a message without one'
        )


def _bytes(text: str | None, encoded: str | None) -> bytes | None:
    if encoded is not None:
        return base64.b64decode(encoded, validate=True)
    return None if text is None else text.encode()


def _field(line: bytes, name: str, number: int) -> bytes:
    """The value of a field of a JSON object, as the bytes of a key."""
    try:
        value = _decode_any(line)[name]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise InvalidArgument(
            f"line {number} is no JSON object with a field {name!r}; choose another --key-field"
        ) from None
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)


# ---------------------------------------------------------------- writing


def topic_of(message: Any) -> str:
    """Return the topic that a message belongs to; only the broker knows whether its name is a partition's."""
    name: str = message.topic
    return name if message.partition is None else name.removesuffix(f"-part-{message.partition}")


def _text_or_base64(into: dict[str, Any], name: str, value: bytes | None) -> None:
    try:
        into[name] = None if value is None else value.decode()
    except UnicodeDecodeError:
        into[f"{name}_base64"] = base64.b64encode(value or b"").decode()


def json_line(message: Any) -> bytes:
    """Write a received message as one line of JSON."""
    fields: dict[str, Any] = {"topic": message.topic, "offset": message.offset}
    if message.partition is not None:
        fields["partition"] = message.partition
    _text_or_base64(fields, "key", message.key)
    fields["attributes"] = message.attributes
    fields["publish_time"] = time_text(message.publish_time)
    if message.event_time is not None:
        fields["event_time"] = message.event_time
    fields["producer_name"] = message.producer_name
    fields["sequence"] = message.sequence
    fields["redelivery_count"] = message.redelivery_count
    _text_or_base64(fields, "payload", message.payload)
    return msgspec.json.encode(fields) + LINE_END


_CONTROLS = "\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069"
"""What steers a terminal, ends a line, or shows a text in another order."""
_UNSAFE = re.compile(f"[{_CONTROLS}]")
_UNSAFE_IN_TEXT = re.compile(f"(?![\\n\\t])[{_CONTROLS}]")


def _safe(value: bytes, unsafe: re.Pattern[str] = _UNSAFE) -> bytes:
    """Write control characters, and what is no UTF-8, as Python does: they must not steer a terminal or forge a line."""
    text = value.decode(errors="backslashreplace")
    return unsafe.sub(lambda match: ascii(match[0])[1:-1], text).encode()


def safe_json_line(message: Any) -> bytes:
    """Write a received message as one line of JSON for a terminal: it holds the same."""
    text = json_line(message).decode().removesuffix("\n")
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + LINE_END


_PIECE = re.compile(r"%(.)|\\(.)|([^%\\]+)", re.DOTALL)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_FIELDS: dict[str, Callable[[Any], bytes]] = {
    "t": lambda message: topic_of(message).encode(),
    "p": lambda message: b"%d" % (message.partition or 0),
    "o": lambda message: b"%d" % message.offset,
    "k": lambda message: message.key or b"",
    "s": lambda message: message.payload or b"",
    "h": lambda message: ",".join(f"{k}={v}" for k, v in message.attributes.items()).encode(),
    "T": lambda message: time_text(message.publish_time).encode(),
}
_NAMES_SAFE: dict[str, Callable[[Any], bytes]] = {
    **_FIELDS,
    "k": lambda message: _safe(_FIELDS["k"](message)),
    "h": lambda message: _safe(_FIELDS["h"](message)),
}
"""For lines that people read."""
_ALL_SAFE: dict[str, Callable[[Any], bytes]] = {
    **_NAMES_SAFE,
    "s": lambda message: _safe(_FIELDS["s"](message), _UNSAFE_IN_TEXT),
}
"""For a terminal. Line ends and tabs of a payload are its text."""


def formatter(
    template: str, *, is_own: bool = False, at_terminal: bool = False
) -> Callable[[Any], bytes]:
    r"""Return a function that writes a message by `template`: %t topic, %p partition, %o offset, %k key, %s payload,
    %h attributes, %T publish time, %% a percent sign; \n, \t, \r, \0, \\. A line end follows.

    Control characters are written as Python does: `at_terminal` all but line ends and tabs of payloads, else only those of
    keys and attributes, where the template `is_own`, of a command and not of a user.

    Raises InvalidArgument for anything else behind a '%' or a backslash.
    """
    fields = _ALL_SAFE if at_terminal else _NAMES_SAFE if is_own else _FIELDS
    pieces: list[bytes | Callable[[Any], bytes]] = []
    place = 0
    for match in _PIECE.finditer(template):
        if match.start() != place:
            break
        place = match.end()
        field, escape, literal = match.groups()
        if literal is not None:
            pieces.append(literal.encode())
        elif field == "%":
            pieces.append(b"%")
        elif field in fields:
            pieces.append(fields[field])
        elif escape in _ESCAPES:
            pieces.append(_ESCAPES[escape])
        else:
            raise InvalidArgument(f"{match[0]!r} means nothing in a format; see `consume --help`")
    if place != len(template):
        raise InvalidArgument(f"the format {template!r} ends in the middle; write %% for a percent")
    pieces.append(LINE_END)

    def write_message(message: Any) -> bytes:
        return b"".join(p if isinstance(p, bytes) else p(message) for p in pieces)

    return write_message
