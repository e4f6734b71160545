"""Where `danube-fast` begins: the commands, and what becomes of their errors.

Exit codes: 0 done, 1 anything else, 2 usage, 3 not found, 4 refused by the broker, 5 unreachable,
130 Ctrl-C, 141 stdout closed. An error is one sentence on stderr; `--debug` adds the traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from danube_fast import errors
from danube_fast.cli import (
    bench,
    completion,
    config,
    consume,
    demo,
    doctor,
    namespaces,
    produce,
    serve,
    status,
    subscriptions,
    topic_messages,
    wal,
)
from danube_fast.cli.output import StdoutClosed

__all__ = ["app", "main", "run"]

PROGRAM = "danube-fast"

EXIT_OTHER = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_REFUSED = 4
EXIT_UNREACHABLE = 5
EXIT_INTERRUPTED = 130
EXIT_STDOUT_CLOSED = 141

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

app = typer.Typer(
    name=PROGRAM,
    help="A publish/subscribe message broker for one big host.",
    epilog="\b\nExample:\n"
    "  danube-fast serve --workers 2\n"
    "  danube-fast produce /default/hello -m 'hello, world'\n"
    "  danube-fast consume /default/hello --subscription me --from earliest --max 1",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _module in (serve, produce, consume, status, doctor, demo, bench, completion):
    _module.register(app)
for _module in (topic_messages, subscriptions, namespaces, wal, config):
    app.add_typer(_module.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"{PROGRAM} {importlib.metadata.version('danube-fast')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Its number.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback with an error (at any place).")
    ] = False,
) -> None:
    """A publish/subscribe message broker for one big host."""


def _take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """`--debug` may stand anywhere before a `--`."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    head = [word for word in words[:end] if word != "--debug"]
    return head + words[end:], len(head) != end


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    words, debug = _take_debug(arguments)
    try:
        outcome = app(words, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except StdoutClosed:
        return EXIT_STDOUT_CLOSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except typer.Abort:
        return EXIT_INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report(error)


def _report(error: Exception) -> int:
    """One sentence on stderr; the exit code."""
    if isinstance(error, errors.DanubeError):
        text = str(error)
        code = next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
    elif isinstance(error, _ClickException):
        text = " ".join(error.format_message().split())
        if not text:  # the help was shown instead
            return EXIT_USAGE
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else PROGRAM
        text = f"{text.rstrip('.')}; see `{command} --help`"
        code = EXIT_USAGE
    elif isinstance(error, OSError) and error.filename is not None:
        text, code = f"{error.filename}: {error.strerror}; check that path", EXIT_OTHER
    else:
        name = type(error).__name__
        text, code = f"{name}: {error}; run it again with --debug to see where", EXIT_OTHER
    sentence = " ".join(text.splitlines())
    print(f"{PROGRAM}: {sentence}", file=sys.stderr, flush=True)
    return code


def run() -> None:
    """Entry point of the console script."""
    completion.answer_shell(app, PROGRAM)
    code = main(sys.argv[1:])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or EXIT_STDOUT_CLOSED
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
