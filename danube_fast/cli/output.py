"""How commands print: results on stdout as text or JSON, remarks on stderr, and a quiet end when
the reader of stdout has gone.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from danube_fast.checks import amount_text, shown_name, unit_of
from danube_fast.cli.options import OutputForm
from danube_fast.clock import SECOND_NS, SystemClock

__all__ = [
    "Progress",
    "StdoutClosed",
    "bytes_text",
    "counted",
    "duration_text",
    "exact_text",
    "note",
    "print_policy",
    "print_quota",
    "print_result",
    "print_table",
    "refuse_without_yes",
    "safe_text",
    "time_text",
    "write",
]

PROGRESS_NS = SECOND_NS // 4
SECONDS_PER_MINUTE = 60
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
INLINE_ITEMS_MAX = 4
_UNIT_STEP = 1024


class StdoutClosed(Exception):
    """Raised when the reader of stdout has gone, as `head` does; the command ends without a word."""


def write(content: bytes) -> None:
    """Put bytes on stdout now. Raises StdoutClosed."""
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # the interpreter flushes stdout once more when it ends; let that go nowhere
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise StdoutClosed from None
    except OSError as fault:
        raise OSError(fault.errno, fault.strerror, _stdout_name()) from None


def _stdout_name() -> str:
    """Return the file that stdout is, where it is one."""
    try:
        name = os.readlink("/proc/self/fd/1")
    except OSError:
        name = ""
    return name if name.startswith("/") else "standard output"


def note(text: str) -> None:
    """Print a remark for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """One line on stderr that is written anew while a command works; only at a terminal."""

    def __init__(self, *, beside_stdout: bool = False) -> None:
        """`beside_stdout`: the command prints meanwhile, so its output must go elsewhere."""
        self._shown = sys.stderr.isatty() and not (beside_stdout and sys.stdout.isatty())
        self._clock = SystemClock()
        self._due_ns = self._clock.monotonic_ns() + PROGRESS_NS

    def show(self, text: str) -> None:
        """Say how far it is, a few times a second at most."""
        if self._shown and self._clock.monotonic_ns() >= self._due_ns:
            self._due_ns = self._clock.monotonic_ns() + PROGRESS_NS
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_result(form: OutputForm, value: Any, text: str | None = None) -> None:
    """Print `value` as one JSON line, or as text: the one given, or laid out from the value."""
    if form is OutputForm.JSON:
        write(msgspec.json.encode(value) + b"\n")
    else:
        write((_laid_out(value) if text is None else text).encode() + b"\n")


def print_table(form: OutputForm, rows: Sequence[Mapping[str, Any]], empty: str) -> None:
    """Rows with the same keys: a table, or a JSON array. `empty` is said when there are none."""
    if form is OutputForm.TEXT and not rows:
        note(empty)
    else:
        print_result(form, rows, "\n".join(_table(rows)))


def refuse_without_yes(yes: bool, what: str) -> None:
    """Raise unless the user said --yes. `what` says what would happen."""
    if not yes:
        from danube_fast.errors import InvalidArgument

        raise InvalidArgument(f"this {what}; add --yes to do it")


def time_text(time_ns: int) -> str:
    """Nanoseconds since the epoch as RFC 3339, UTC, all nine digits."""
    seconds, rest = divmod(time_ns, SECOND_NS)
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest:09}Z"


def counted(count: int, what: str) -> str:
    """Write a number of things as people say it."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def bytes_text(byte_count: float) -> str:
    """Write a number of bytes as people say it."""
    size = float(byte_count)
    for unit in _BYTE_UNITS:
        if size < _UNIT_STEP or unit == _BYTE_UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _UNIT_STEP
    return ""


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_ns") and isinstance(value, int):
        return time_text(value)[:-11].replace("T", " ") + "Z" if value else "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_cell(key, item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(_cell(name, item) for item in value) or "-"
    return _number(name, value) if isinstance(value, int | float) else _shown(str(value)) or "-"


def _shown(text: str) -> str:
    """Write control characters as Python does: what others have published must not steer a terminal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def safe_text(text: str) -> str:
    """Return a name for a sentence; see `shown_name`."""
    return shown_name(text)


def _number(name: str, value: float) -> str:
    """A number as people say it: with the unit that its name has, and no more digits than matter."""
    unit = unit_of(name)
    if unit == "b":
        return bytes_text(value) + ("/s" if name.endswith("_per_second") else "")
    if unit:
        return duration_text(value * _SECONDS[unit])
    if name.endswith(("load", "loads")):
        return f"{value:.1%}".replace("%", " %")
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def duration_text(seconds: float) -> str:
    """Write a time as people say it."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < SECONDS_PER_MINUTE:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), SECONDS_PER_MINUTE)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(i for i, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {word}" for count, word in parts[first : first + 2] if count)


_WORDS = {"principal": "user", "credential": "key"}
"""What a person calls that which the protocol names so."""


def _heading(name: str) -> str:
    """A name as people read it; the unit stands with the value."""
    unit = unit_of(name)
    words = [_WORDS.get(each, each) for each in name.removesuffix("_ns").split("_")]
    if unit and words[-1] in ("ms", "us", "seconds") and len(words) > 1:
        words = ["lag", "time"] if words[0] == "lag" else words[:-1]
    return " ".join(words)


def print_policy(form: OutputForm, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Values under the names by which they are set, as they may be set, and who sets each."""
    rows = [
        {"name": name, "value": exact_text(name, value), "set by": sources[name]}
        for name, value in values.items()
    ]
    print_result(form, values, "\n".join(_table(rows)))


def print_quota(form: OutputForm, described: Mapping[str, Any]) -> None:
    """Values of a namespace's quota: the limit of each, and what is used of it."""
    rows = [
        {
            "name": name,
            "limit": exact_text(name, value["limit"]) if value["limit"] else "none",
            "used": "-" if value["used"] is None else exact_text(name, value["used"]),
        }
        for name, value in described.get("quota", {}).items()
    ]
    print_result(form, described, "\n".join(_table(rows)))


def exact_text(name: str, value: Any) -> str:
    """Write a setting as it may be written: with its unit if it has one, and not rounded."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return amount_text(name, value)
    return str(value) if value != "" else '""'


def _table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Aligned columns, numbers to the right; never cut, however narrow the terminal."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(name, row.get(name)) for name in names] for row in rows]
    heads = [_heading(name).upper() for name in names]
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(names))]
    right = [
        all(type(row.get(name)) in (int, float, type(None)) for row in rows)
        and not name.endswith("_ns")
        for name in names
    ]
    return [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [heads, *cells]
    ]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, Mapping) for x in value)


def _is_block(value: Any) -> bool:
    """Whether a value takes lines of its own: a table, or many names and values."""
    return _is_rows(value) or (isinstance(value, Mapping) and len(value) > INLINE_ITEMS_MAX)


def _laid_out(value: Any) -> str:
    """Any answer of an operation as text: names and values, then its tables."""
    if _is_rows(value):
        return "\n".join(_table(value))
    if not isinstance(value, Mapping):
        return _cell("", value)
    blocks = {name: item for name, item in value.items() if _is_block(item)}
    plain = {name: item for name, item in value.items() if name not in blocks}
    width = max((len(_heading(name)) for name in plain), default=0)
    lines = [f"{_heading(name):{width}}  {_cell(name, item)}" for name, item in plain.items()]
    for name, block in blocks.items():
        lines += ["", _heading(name), *(f"  {line}" for line in _laid_out(block).split("\n"))]
    return "\n".join(lines).strip("\n")
