"""Errors of commands: an exit code, and one sentence on stderr, or with `-o json` one JSON object.

Exit codes: 0 done, 1 anything else, 2 usage, 3 not found, 4 refused by the broker, 5 unreachable,
130 Ctrl-C, 141 stdout closed, 143 SIGTERM.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from danube_fast import errors

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_STDOUT_CLOSED",
    "EXIT_TERMINATED",
    "EXIT_USAGE",
    "PROGRAM",
    "report",
    "wants_json",
]

PROGRAM = "danube-fast"
WORD_CHARACTERS_MAX = 1000
"""Longer than a path that people have."""
WORD_CHARACTERS_SHOWN = 100

EXIT_OTHER = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_REFUSED = 4
EXIT_UNREACHABLE = 5
EXIT_INTERRUPTED = 130
EXIT_STDOUT_CLOSED = 141
EXIT_TERMINATED = 143

# The first that fits, from the most special to the most general.
_EXIT_CODES: tuple[tuple[type[errors.DanubeError], int], ...] = (
    (errors.InvalidArgument, EXIT_USAGE),
    (errors.NotFound, EXIT_NOT_FOUND),
    (errors.Unavailable, EXIT_UNREACHABLE),
    (errors.DeadlineExceeded, EXIT_UNREACHABLE),
    (errors.AlreadyExists, EXIT_REFUSED),
    (errors.FailedPrecondition, EXIT_REFUSED),
    (errors.PermissionDenied, EXIT_REFUSED),
    (errors.ResourceExhausted, EXIT_REFUSED),
    (errors.DanubeError, EXIT_OTHER),
)

# typer carries click inside since 0.26 and beside before; its own exports lead to either.
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickException: Any = _UsageError.__mro__[1]
_JSON_WORDS = ("-ojson", "--output=json", "-o=json")


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, even if it is wrong otherwise."""
    head = list(words[: words.index("--")] if "--" in words else words)
    pairs = itertools.pairwise(head)
    asked = any(option in ("-o", "--output") and form == "json" for option, form in pairs)
    return asked or any(word in _JSON_WORDS for word in head)


def report(error: Exception, *, as_json: bool) -> int:
    """Say on stderr what failed and what to do; the exit code."""
    code, name, text = _judged(error)
    if not text:  # the help was shown instead
        return code
    sentence = " ".join(map(_cut, text.split()))
    line = errors.failure_line(name, sentence) if as_json else f"{PROGRAM}: {sentence}"
    print(line, file=sys.stderr, flush=True)
    return code


def _cut(word: str) -> str:
    """Cut a word that is no word, such as a file's content in place of a name."""
    if len(word) <= WORD_CHARACTERS_MAX:
        return word
    return f"{word[:WORD_CHARACTERS_SHOWN]}... ({len(word)} characters)"


def _judged(error: Exception) -> tuple[int, str, str]:
    """Exit code, name of the error, and text."""
    name = type(error).__name__
    if isinstance(error, errors.DanubeError):
        code = next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
        return code, name, _WAY_IN.sub(_variable, _FOR_COMMANDS.sub(r"\1", str(error)))
    if isinstance(error, _ClickException):
        text = _usage_text(error)
        if text:
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else PROGRAM
            text = f"{text.rstrip('.')}; see `{command} --help`"
        return EXIT_USAGE, errors.InvalidArgument.__name__, text
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}; check that path"
        return EXIT_OTHER, name, text
    return EXIT_OTHER, name, f"{name}: {error}; run it again with --debug to see where"


_WAY_IN = re.compile(r"(?<![\w'])(key_file|server_key|server_uid|sign_on|tls|token)=(?![\w/.\"])")
"""Parameters of a client, in its texts for programs."""
_FOR_COMMANDS = re.compile(r"pass [^():]*\(commands: ([^()]*)\)")
"""A text for programs, with the one for commands behind it."""


def _variable(match: re.Match[str]) -> str:
    """Return the variable that gives a command what a program passes as a parameter."""
    name = "token_file" if match[1] == "token" else match[1]
    return f"DANUBE_{name.upper()}" + "=" * (match.string[match.end() : match.end() + 1] == "'")


# ---------------------------------------------------------------- usage

_WORDS = {
    "int_parsing": "is not a whole number",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "int_parsing_size": "is too large",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "finite_number": "is not a number that ends",
    "bool_parsing": "is neither true nor false",
    "greater_than_equal": "is too small: at least {ge}",
    "greater_than": "is too small: more than {gt}",
    "less_than_equal": "is too large: at most {le}",
    "less_than": "is too large: less than {lt}",
}
"""Our words for what the parser of options finds wrong, by its kinds of fault."""


def _usage_text(error: Any) -> str:
    """A usage error in our words, with what was typed."""
    parameter = getattr(error, "param", None)
    text = " ".join(error.format_message().split())
    named = _named(parameter)
    details = getattr(error.__cause__, "errors", None)
    if parameter is not None and callable(details):
        fault = details()[0]
        typed = str(fault.get("input", ""))
        words = _WORDS.get(fault.get("type", ""))
        if words is not None:
            return f"{named} {typed!r} {words.format(**fault.get('ctx', {}))}"
        reason = str(fault.get("msg", "")).removeprefix("Value error, ")
        return f"{named}: {reason}" if repr(typed) in reason else f"{named} {typed!r}: {reason}"
    if parameter is not None and text.startswith("Missing"):
        return f"missing: {named}"
    return text.removeprefix("Invalid value: ")


def _named(parameter: Any) -> str:
    """An option by its longest spelling, an argument by what it is, not by its placeholder."""
    options = [name for name in getattr(parameter, "opts", ()) if name.startswith("-")]
    if options:
        return str(max(options, key=len))
    return f"the {str(getattr(parameter, 'name', 'argument')).replace('_', ' ')}"
