"""Records of the audit log: who did what, from where, with which outcome. A line of JSON each, never with a secret.

begin   an administrative change is wanted; it is made only once this line is durable
end     its outcome, under the same request; a begin without an end was cut short or refused
denied  an action that was refused, `count` times
closed  `count` sessions, producers or consumers that were open and may not be any more: rights or a credential have ended
lost    `count` records that are missing: denials beyond the budget, or lines that the disk may have lost
note    an act of the broker itself
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from collections.abc import Mapping, Set
from typing import Any

import msgspec

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.types import REPLY_TOPICS

__all__ = [
    "ITEMS_MAX",
    "LINE_BYTES_MAX",
    "AuditRecord",
    "cut_arguments",
    "decode_record",
    "encode_record",
    "fingerprint",
    "shown_address",
    "shown_arguments",
    "shown_text",
    "shown_time",
]

LINE_BYTES_MAX = 16 * 1024
"""No line is longer; a longer one is damage."""
TEXT_CHARACTERS_MAX = 200
NAME_CHARACTERS_MAX = 600
"""A resource: namespace, topic and subscription."""
ITEMS_MAX = 16
"""Of a list; what gives rights must show all of it, so no change has a longer one."""
DEPTH_MAX = 3
FINGERPRINT_DIGITS = 16
_CUT = "..."
_SECRETS = re.compile(
    r"/system/reply-[^\s#]*|(?:curve:|dfk_[A-Za-z0-9_-]{1,16}_|eyJ[A-Za-z0-9_-]*\.)[^\s,;]*"
    r"|(?<!\S)(?!mtls:)(?=(?:\S*?[^\w./#:*?-]){3})[!-~]{40}(?!\S)"
)
"""The name of a reply topic, which guards it; a key with its kind, an API key, a token; and 40 characters that look like a CURVE key, and like no name."""
_CUTS = (60, 16), (30, 8), (15, 4), (7, 2)
"""Characters of a text and items of a list to which arguments are cut, one behind the other until there is room."""
_PEER = re.compile(r"localhost:([0-9]+):[0-9]+:([0-9]+)")
"""How ZeroMQ writes a peer on ipc: user, group, process."""


class AuditRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of the log. What is empty is left out."""

    seq: int = 0
    """Number of the record; it only grows."""
    time: str = ""
    """Wall time in UTC, RFC 3339 with milliseconds."""
    event: str
    principal: str = ""
    """Who: the name by which rights were looked up; empty: no one that is known."""
    proof: str = ""
    """What the connection has proved: `uid:` and a number, or `curve:` and a fingerprint of the public key."""
    address: str = ""
    """From where: an IP address, or `uid:USER pid:PROCESS` on this host."""
    action: str = ""
    """The operation or the command."""
    resource: str = ""
    arguments: dict[str, Any] = {}
    outcome: str = ""
    """`ok`, or the name of the error."""
    request: str = ""
    """Number of the session and of its request, in the process."""
    process: str = ""
    count: int = 1


_decoder = msgspec.json.Decoder(AuditRecord)
_encoder = msgspec.json.Encoder()


def encode_record(record: AuditRecord) -> bytes:
    """Make the line of a record, its end included."""
    line = _encoder.encode(record)
    if len(line) >= LINE_BYTES_MAX:
        line = _encoder.encode(msgspec.structs.replace(record, arguments={"omitted": "too long"}))
    return line + b"\n"


def decode_record(line: bytes) -> AuditRecord | None:
    """Read a line; None if it is damaged."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


def shown_time(wall_ns: int) -> str:
    """Write nanoseconds since the epoch as RFC 3339 in UTC, with milliseconds."""
    moment = dt.datetime.fromtimestamp(wall_ns // SECOND_NS, dt.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{wall_ns % SECOND_NS // MILLISECOND_NS:03}Z"


def fingerprint(proof: str) -> str:
    """Shorten a proof so that it can be told from others, and used by no one."""
    kind, _, value = proof.partition(":")
    if kind == "curve":
        return f"curve:{hashlib.sha256(value.encode()).hexdigest()[:FINGERPRINT_DIGITS]}"
    return shown_text(proof)


def shown_address(address: str) -> str:
    """Write the address of a peer as ZeroMQ has it for people."""
    match = _PEER.fullmatch(address)
    return f"uid:{match[1]} pid:{match[2]}" if match else shown_text(address)


def shown_text(text: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    """Bound a text of a client, and take out what looks like a key or a token."""
    if len(text) > characters_max:
        text = text[: characters_max - len(_CUT)] + _CUT
    return _SECRETS.sub(_hidden, text)


def _hidden(match: re.Match[str]) -> str:
    text = match[0]
    if text.startswith(REPLY_TOPICS):
        return f"{REPLY_TOPICS}(hidden)"
    if text.startswith("dfk_"):
        return f"{'_'.join(text.split('_', 2)[:2])}_(secret)"
    return fingerprint(text) if text.startswith("curve:") else "(hidden)"


def shown_arguments(
    arguments: Mapping[str, Any], allowed: Set[str], depth: int = 0
) -> dict[str, Any]:
    """Copy the arguments of an operation whose names are allowed, bounded; of others their names alone are told."""
    shown: dict[str, Any] = {}
    hidden: list[str] = []
    for name, value in list(arguments.items())[:ITEMS_MAX]:
        if name not in allowed:
            hidden.append(name)
        elif name == "public_key" and isinstance(value, str) and value:
            shown[name] = fingerprint(f"curve:{value}")
        elif value is not None:
            shown[name] = _shown_value(value, allowed, depth + 1)
    if hidden:
        shown["not_shown"] = [shown_text(str(name), 64) for name in hidden]
    return shown


def cut_arguments(shown: dict[str, Any], bytes_max: int) -> dict[str, Any]:
    """Cut long texts and lists of arguments as they are shown, so that none hides the others; if all of them still take
    more than so many bytes, their names alone are told."""
    cut = shown
    for characters, items in _CUTS:
        if len(_encoder.encode(cut)) <= bytes_max:
            return cut
        cut = {name: _cut_value(value, characters, items) for name, value in shown.items()}
    return cut if len(_encoder.encode(cut)) <= bytes_max else {"not_shown": list(shown)}


def _cut_value(value: Any, characters: int, items: int) -> Any:
    if isinstance(value, dict):
        return {name: _cut_value(each, characters, items) for name, each in value.items()}
    if isinstance(value, list):
        some = [_cut_value(each, characters, items) for each in value[:items]]
        return [*some, _CUT] if len(value) > items else some
    if isinstance(value, str) and len(value) > characters:
        return value[: characters - len(_CUT)] + _CUT
    return value


def _shown_value(value: Any, allowed: Set[str], depth: int) -> Any:
    if isinstance(value, bool | int | float):
        return value
    if depth > DEPTH_MAX:
        return _CUT
    if isinstance(value, Mapping):
        return shown_arguments(value, allowed, depth)
    if isinstance(value, list | tuple | set | frozenset):
        some = [_shown_value(item, allowed, depth + 1) for item in list(value)[:ITEMS_MAX]]
        return [*some, _CUT] if len(value) > ITEMS_MAX else some
    return shown_text(str(value))
