"""Components of other packages, found by entry point and named by a setting: `NAME`, or `NAME:TEXT` where the component
takes a text."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import InvalidArgument, Unavailable
from danube_fast.security.question_threads import QuestionThreads

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["EntryPointGroup", "FaultLog", "said"]

LOG_NS = 10 * SECOND_NS
"""Faults of a component are logged once in this time."""
SAID_CHARACTERS_MAX = 500
"""Of an error of another package."""
_WORD = re.compile(r"[^\s:/@?&=,;]{3,}")
"""A part of the text of a setting that may be a password."""


class EntryPointGroup(NamedTuple):
    """Components of one kind: callables that take a text and return an object."""

    name: str
    setting: str
    """Which of them is in use; named as one of them is."""
    methods: dict[str, str]
    """Names of the methods that the object has, and their parameters, for texts of errors."""

    def check(self, value: str) -> None:
        """Check a value of the setting; loads no package. Raises InvalidArgument for a name that no package has."""
        self._find(value.partition(":")[0])

    def load(self, value: str, start_timeout_ms: int) -> Any:
        """Make the object that a value of the setting names. Raises InvalidArgument if there is none like that, Unavailable
        if it is not made in half of the time in which this process has to start."""
        # before the supervisor takes the process for one that hangs, which could not say why
        seconds = start_timeout_ms / 2000
        name, _, argument = value.partition(":")
        entry = self._find(name)
        made = QuestionThreads(self.setting, 1).ask(lambda: entry.load()(argument))
        try:
            outcome = made.result(seconds)
        except TimeoutError:
            package = "another package" if entry.dist is None else f"the package {entry.dist.name}"
            raise Unavailable(
                f"the {self.setting} {name} is {entry.value} of {package}, which has not been made within {seconds:g} s; "
                f"repair what it waits for, or leave the setting {self.setting} empty"
            ) from None
        found = outcome.found
        if outcome.error is not None:
            raise InvalidArgument(
                f"the {self.setting} {name} is {entry.value} of another package, which cannot be loaded: "
                f"{_said_without(argument, outcome.error)}; repair it, or leave the setting {self.setting} empty"
            ) from None
        for method, parameters in self.methods.items():
            if not callable(getattr(found, method, None)):
                raise InvalidArgument(
                    f"the {self.setting} {name} is {entry.value}, which gives no object with {method}({parameters}); see "
                    "docs/security.md"
                )
            if iscoroutinefunction(getattr(found, method)):
                raise InvalidArgument(
                    f"the {self.setting} {name} is {entry.value}, whose {method} is a coroutine function, which no thread "
                    "can await; write it without async"
                )
        return found

    def _find(self, name: str) -> EntryPoint:
        """The entry point of a name. Raises InvalidArgument if there is none."""
        # imports two dozen modules, which few brokers need
        from importlib.metadata import entry_points

        found = entry_points(group=self.name, name=name)
        if not found:
            known = ", ".join(sorted(entry_points(group=self.name).names)) or "none"
            raise InvalidArgument(
                f"no installed package has an {self.setting} {name!r}; there are: {known}"
            )
        return next(iter(found))


def said(error: BaseException, how: Callable[[BaseException], str] = str) -> str:
    """Return what an error of another package says, as text that can be sent and shown: short, in one line, without control
    characters and lone surrogates. All such texts come in here."""
    try:
        text = how(error)[:SAID_CHARACTERS_MAX]
    except Exception:  # it may fail at that, too
        text = type(error).__name__
    shown = (" " if each.isspace() else each if each.isprintable() else "?" for each in text)
    return "".join(shown)


def _said_without(argument: str, error: BaseException) -> str:
    """Return an error as one line, without the words of a text that may hold a password."""
    words = {argument.strip(), *_WORD.findall(argument)} - {""}
    # as they are, and as URLs and messages write them
    forms = {form for word in words for form in (word, repr(word)[1:-1], unquote(word))}

    def how(error: BaseException) -> str:
        text = " ".join(str(error).split())
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, "...")
        name = type(error).__name__
        return f"{name}: {text}" if text else name

    return said(error, how)


class FaultLog:
    """Warn of faults of one component, however many there are, once in a while."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._logged_ns = -LOG_NS

    def warn(self, text: str, *values: Any) -> None:
        """Log a warning, unless there was one just now."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._logged_ns >= LOG_NS:
            self._logged_ns = now_ns
            self._log.warning(text, *values)
