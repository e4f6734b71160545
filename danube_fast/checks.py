"""The checks of what applications and people hand over: types, ranges, and the words of a refusal.

Every public argument goes through one of these before anything is changed or sent, so a wrong one fails
at the call, with InvalidArgument that names it, and the object it was given to goes on as before.
"""

from __future__ import annotations

import datetime as dt
import difflib
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from danube_fast.errors import InvalidArgument

__all__ = [
    "COMPONENTS",
    "NAME_BYTES_MAX",
    "SECONDS_MAX",
    "TIME_NS_MAX",
    "amount_text",
    "check_callable",
    "check_choice",
    "check_mapping",
    "check_names",
    "check_seconds",
    "check_text",
    "check_time_ns",
    "check_whole",
    "in_our_words",
    "parse_amount",
    "shown_name",
    "shown_value",
    "unit_of",
]

COMPONENTS = frozenset({"authenticator", "authorizer"})
"""Settings that are NAME:TEXT of a component of another package, where a word of TEXT may be a password."""
NAME_BYTES_MAX = 256
"""UTF-8 bytes of the name of a producer, a consumer or a subscription."""
SHOWN_CHARACTERS_MAX = 300
"""Of a name in an error; longer ones are cut."""
SECONDS_MAX = 1e9
TIME_NS_MAX = (1 << 63) - 1
_INT64_MIN = -(1 << 63)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_KINDS = {
    "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false",
    "object": "a mapping", "array": "a list", "bytes": "bytes", "null": "nothing",
}  # fmt: skip


def check_text(value: Any, what: str, *, bytes_max: int = NAME_BYTES_MAX) -> str:
    """Return text of 1 to `bytes_max` bytes. Raises InvalidArgument."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} is text, not {_kind(value)}: {value!r:.100}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} is not valid Unicode: {value!r:.100}") from None
    if not 0 < size <= bytes_max:
        raise InvalidArgument(f"{what} has {size} bytes; give it 1 to {bytes_max}")
    return str(value)


def check_whole(value: Any, what: str, low: int, high: int = TIME_NS_MAX) -> int:
    """Return a whole number from `low` to `high`. Raises InvalidArgument."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise InvalidArgument(f"{what} is a whole number, not {_kind(value)}: {value!r:.100}")
        value = int(value)
    if not low <= value <= high:
        limits = f"at least {low}" if high == TIME_NS_MAX else f"{low} to {high}"
        raise InvalidArgument(f"{what} is {value!r:.100}; choose {limits}")
    return int(value)


def check_seconds(value: Any, what: str, *, is_positive: bool = False) -> float:
    """Return a finite number of seconds. What is over already may be negative, unless the time
    `is_positive`. Raises InvalidArgument."""
    if type(value) not in (int, float) and (
        isinstance(value, bool) or not isinstance(value, numbers.Real)
    ):
        raise InvalidArgument(f"{what} is a number of seconds, not {_kind(value)}: {value!r:.100}")
    seconds = float(value)
    if not math.isfinite(seconds) or abs(seconds) > SECONDS_MAX:
        raise InvalidArgument(f"{what} is {value}; give seconds, at most {SECONDS_MAX:.0f}")
    if is_positive and seconds <= 0:
        raise InvalidArgument(f"{what} is {value}; give more than 0 seconds")
    return seconds


def check_time_ns(value: Any, what: str, low: int = _INT64_MIN, high: int = TIME_NS_MAX) -> int:
    """Return nanoseconds since the epoch, from an int or a datetime with a time zone. Raises
    InvalidArgument."""
    if isinstance(value, dt.datetime):
        if value.tzinfo is None:
            raise InvalidArgument(
                f"{what} has no time zone: {value.isoformat()}; use datetime.now(timezone.utc), or "
                "astimezone() if it is local time"
            )
        value = (value - _EPOCH) // _MICROSECOND * 1000
    elif isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidArgument(
            f"{what} is nanoseconds (int) or a datetime, not {_kind(value)}: {value!r:.100}"
        )
    if not low <= value <= high:
        raise InvalidArgument(f"{what} is {value!r:.100}; choose {low} to {high} nanoseconds")
    return int(value)


def check_choice(value: Any, what: str, choices: Iterable[Any]) -> None:
    """Raise InvalidArgument for what is none of `choices`."""
    known = list(choices)
    if not any(isinstance(value, type(choice)) and value == choice for choice in known):
        near = difflib.get_close_matches(str(value), [str(choice) for choice in known], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        names = ", ".join(map(repr, known))
        raise InvalidArgument(f"{what}={value!r:.100} is unknown; use one of {names}{hint}")


def check_names(given: Iterable[str], known: Iterable[str], call: str) -> None:
    """Raise InvalidArgument for an option that `call` does not have."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, cutoff=0.5)
            hint = f"; did you mean {near[0]}=?" if near else ""
            raise InvalidArgument(
                f"{call} has no option {name}=; there are: {', '.join(names)}{hint}"
            )


def check_mapping(value: Any, what: str) -> dict[str, Any]:
    """Return a copy of a mapping with names as keys. Raises InvalidArgument."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidArgument(f"{what} is a dict of names and values, not {value!r:.100}")
    return dict(value)


def check_callable(value: Any, what: str) -> None:
    """Raise InvalidArgument for what cannot be called."""
    if not callable(value):
        raise InvalidArgument(f"{what} is a function, not {_kind(value)}: {value!r:.100}")


def _kind(value: Any) -> str:
    return type(value).__name__


# ---------------------------------------------------------------- sizes and durations

_SIZES = {"b": 1}
for _power, _letter in enumerate("kmgtp", 1):
    _SIZES[f"{_letter}ib"] = 1024**_power
    _SIZES[f"{_letter}b"] = 1000**_power
_TIMES_NS = {
    "ns": 1, "us": 1000, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "min": 60 * 10**9,
    "h": 3600 * 10**9, "d": 86_400 * 10**9,
}  # fmt: skip
_TIME_WORDS = {"us": "us", "ms": "ms", "seconds": "s"}
"""How names of settings spell their unit."""
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def unit_of(name: str) -> str:
    """The unit in the name of a setting or a value: "b", "us", "ms", "s", or nothing."""
    words = name.split("_")
    if "bytes" in words:
        return "b"
    if "per" in words:
        return ""
    return next((unit for word, unit in _TIME_WORDS.items() if word in words), "")


def parse_amount(name: str, text: str) -> int | None:
    """The whole number that a text such as 64MiB or 10s spells, in the unit of `name`; None if it is
    neither that nor a plain number. Raises InvalidArgument for a part of the unit."""
    if re.fullmatch(r"[+-]?\d[\d_]*", text.strip()):
        return int(text)
    unit = unit_of(name)
    match = _AMOUNT.fullmatch(text.strip())
    scale = _SIZES if unit == "b" else _TIMES_NS
    if not unit or match is None or match[2].lower() not in scale:
        return None
    amount = Fraction(match[1]) * scale[match[2].lower()] / scale[unit]
    if amount.denominator != 1:
        raise InvalidArgument(f"{name} cannot be {text!r}: that is no whole number of {unit}")
    return int(amount)


def amount_text(name: str, value: int) -> str:
    """A number as `parse_amount` reads it back, in the largest unit that keeps it whole."""
    unit = unit_of(name)
    if not unit:
        return str(value)
    if unit == "b":
        names = [("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1)]
        size, rate = value, "/s" if name.endswith("_per_second") else ""
    else:
        names = [(each, _TIMES_NS[each]) for each in ("d", "h", "min", "s", "ms", "us")]
        size, rate = value * _TIMES_NS[unit], ""
    best = next(((word, step) for word, step in names if size and size % step == 0), (unit, 0))
    if not best[1]:
        return f"{value} {'B' if unit == 'b' else unit}{rate}"
    return f"{size // best[1]} {best[0]}{rate}"


# The forms in which msgspec says what is wrong, and ours.
_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(r"Expected `([^`]*)`, got `([^`]*)`"),
        lambda m: f"must be {_wanted(m[1])}, not {_KINDS.get(m[2], m[2])}",
    ),
    (re.compile(r"Expected `([^`]*)`(.*)"), lambda m: f"must be {_wanted(m[1])}{m[2]}"),
    (re.compile(r"Object contains unknown field `([^`]*)`"), lambda m: f"has no value {m[1]!r}"),
    (re.compile(r"Object missing required field `([^`]*)`"), lambda m: f"lacks {m[1]!r}"),
    (re.compile(r"Invalid enum value '?([^']*)'?"), lambda m: f"cannot be {m[1]!r}"),
)


def _wanted(kinds: str) -> str:
    names = [_KINDS.get(name.strip(), name.strip()) for name in kinds.split("|")]
    return " or ".join(name for name in names if name != "nothing")


def in_our_words(fault: Exception, what: str) -> str:
    """Say what msgspec found wrong, of `what`, without its words and paths."""
    text, _, path = str(fault).partition(" - at `")
    place = path.rpartition("$")[2].strip("`.")
    if path.startswith("key"):
        place = f"a name in {place}"
    subject = f"{what}: {place}" if place and "[...]" not in place else what
    for form, words in _FORMS:
        match = form.fullmatch(text)
        if match:
            return f"{subject} {words(match)}"
    return f"{subject} {text[:1].lower()}{text[1:]}"


def shown_name(text: str) -> str:
    """Return a name for a sentence: as Python writes it, in ASCII, if that is empty or long, could steer a terminal or
    only looks like another one."""
    is_plain = text.isascii() and text.isprintable() and 0 < len(text) <= SHOWN_CHARACTERS_MAX
    return text if is_plain else f"{text!a:.{SHOWN_CHARACTERS_MAX}}"


def shown_value(name: str, value: Any) -> Any:
    """Return a value of a setting as it may be shown: of a component its name alone."""
    if name not in COMPONENTS or value == "":
        return value
    head, colon, _ = str(value).partition(":")
    return f"{head}{colon and ':...'}" if isinstance(value, str) else "..."
