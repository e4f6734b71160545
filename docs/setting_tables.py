"""Makes the tables of tuning.md: every setting with its default, its unit, when it counts, and what it does.

What a setting does is the sentence below its field, or, of the client's arguments, the one that stands here.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from api_page import attribute_docs

from danube_fast.broker.subscription.policy import FailurePolicy
from danube_fast.broker.topics.policy import TopicPolicy
from danube_fast.broker.topics.quota import NamespaceQuota
from danube_fast.checks import amount_text, unit_of
from danube_fast.client.values import limits
from danube_fast.config import Settings

__all__ = ["filled"]

UNITS = {"b": "bytes", "us": "us", "ms": "ms", "s": "s", "": "-"}
CLIENT = (
    ("`connect`", "transport", "auto", "`auto`: shared memory on the broker's host, else ZeroMQ. `shm` and `zmq` insist; `tcp` takes ZeroMQ over tcp even there."),
    ("`connect`", "server_key", None, "Public key of a broker with `auth`: 40 characters, pinned; several while it is rotated."),
    ("`connect`", "key_file", None, "File with the client's key pair."),
    ("`connect`", "sign_on", None, "`https://HOST:PORT` where `token` is exchanged for a key that the client draws."),
    ("`connect`", "token", None, "API key or token (JWT) for `sign_on`, or a function that returns one."),
    ("`connect`", "tls", None, "File of CAs, or `sha256:` and a fingerprint, by which `sign_on` is known. Empty: the CAs of the system."),
    ("`connect`", "server_uid", None, "User whose processes may be the broker on this host, beside root and our own."),
    ("`connect`", "spin_us", 0, "How long a caller that waits looks on before it sleeps."),
    ("`producer`", "linger_us", limits.LINGER_US_DEFAULT,
     "How long `send()` gathers while something is unacked. An idle producer sends at once, `publish()` never lingers."),
    ("`producer`", "batch_bytes_max", limits.BATCH_BYTES_DEFAULT, "Largest frame of several messages. A full one goes at once."),
    ("`producer`", "window_bytes_max", limits.WINDOW_BYTES_DEFAULT,
     ("Unacked bytes of a producer; then `send()` blocks. All producers of a client together: "
     f"{amount_text('bytes', limits.CLIENT_WINDOW_BYTES)}.")),
    ("`producer`", "timeout", limits.SEND_TIMEOUT_SECONDS, "How long a message may wait for its ack, or a call for the window."),
    ("`producer`", "compression", "none", "`lz4` or `zstd`, of frames."),
    ("`consumer`", "permits_bytes", limits.PERMITS_BYTES_DEFAULT, "What the broker may send ahead of `receive()`."),
    ("`consumer`", "permits_messages", limits.PERMITS_MESSAGES_DEFAULT, "The same in messages. Few, where handlers are slow."),
    ("`consumer`", "timeout", limits.REQUEST_TIMEOUT_SECONDS, "How long to wait for a missing topic."),
)  # fmt: skip
VARIABLES = (
    ("DANUBE_URL", "danube://127.0.0.1:6650", "Where clients and the command line find the broker."),
    ("DANUBE_CONTEXT", "empty", "Context of the command line, as `--context`."),
    ("DANUBE_SERVER_KEY", "empty", "Public key of a broker with `auth`, for the command line; several with blanks or commas."),
    ("DANUBE_KEY_FILE", "empty", "File with the key pair of the command line."),
    ("DANUBE_SIGN_ON", "empty", "Where the command line signs on, `https://HOST:PORT`."),
    ("DANUBE_TOKEN_FILE", "empty", "File (0600) with its API key or token, read for each sign-on."),
    ("DANUBE_TLS", "empty", "File of CAs, or `sha256:` and a fingerprint, for sign-on and `health`."),
    ("DANUBE_SERVER_UID", "empty", "Local user that the broker runs as, for the command line: `server_uid` of `connect`."),
    ("DANUBE_CONFIG", "empty", "Configuration file of `serve`, as `--config`."),
    ("DANUBE_KERNELS", "empty", "`numba`: each process compiles its kernels by itself."),
    ("DANUBE_MALLOC", "empty", "`default`: leave malloc alone; else freed messages stay mapped."),
    ("XDG_CACHE_HOME", "~/.cache", "Compiled kernels are kept in `danube-fast` below it."),
)  # fmt: skip


def _default(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:g} s"
    if isinstance(value, int):
        return amount_text(name, value) if value and unit_of(name) else f"{value:,}"
    return value or "empty"


def _unit(name: str, value: Any) -> str:
    if isinstance(value, float):
        return "s"
    if isinstance(value, bool) or not isinstance(value, int):
        return "-"
    return UNITS[unit_of(name)]


def _table(*names: str, rows: Iterator[tuple[str, ...]]) -> str:
    lines = [names, *rows]
    lines = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])


def _fields(kind: type[msgspec.Struct], live: str) -> str:
    docs = attribute_docs(kind)

    def rows() -> Iterator[tuple[str, ...]]:
        for field in msgspec.structs.fields(kind):
            name, value = field.name, field.default
            effect = " ".join(docs[name].split())
            if not effect:
                raise SystemExit(
                    f"{kind.__name__}.{name} has no sentence below it that says what it does"
                )
            yield f"`{name}`", _default(name, value), _unit(name, value), live, effect

    return _table("setting", "default", "unit", "live", "effect", rows=rows())


def _client_table() -> str:
    rows = (
        (call, f"`{name}`", _default(name, value), _unit(name, value), effect)
        for call, name, value, effect in CLIENT
    )
    return _table("call", "argument", "default", "unit", "effect", rows=rows)


def _variable_table() -> str:
    rows = ((f"`{name}`", default, effect) for name, default, effect in VARIABLES)
    return _table("variable", "default", "effect", rows=rows)


def filled(text: str) -> str:
    """tuning.md with its tables as the code has them."""
    tables = {
        "broker": _fields(Settings, "no"),
        "topic": _fields(TopicPolicy, "yes"),
        "namespace": _fields(NamespaceQuota, "yes"),
        "failure": _fields(FailurePolicy, "yes"),
        "client": _client_table(),
        "variables": _variable_table(),
    }
    for name, table in tables.items():
        start, end = f"<!-- settings:{name} -->", "<!-- settings:end -->"
        text, count = re.subn(
            rf"{start}\n.*?{end}",
            lambda _, t=f"{start}\n{table}\n{end}": t,
            text,
            count=1,
            flags=re.DOTALL,
        )
        if not count:
            raise SystemExit(f"tuning.md has no {start} with a {end} behind it")
    return text
