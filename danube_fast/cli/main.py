"""Where `danube-fast` begins: the commands. What becomes of their errors is in `failures.py`;
`--debug` adds the traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from danube_fast.cli import (
    bench,
    completion,
    config,
    consume,
    demo,
    doctor,
    health,
    interrupts,
    namespaces,
    produce,
    serve,
    status,
    subscriptions,
    topic_messages,
)
from danube_fast.cli.backup import backup, restore
from danube_fast.cli.contexts import context
from danube_fast.cli.contexts.context_file import choose, complete_contexts
from danube_fast.cli.failures import (
    EXIT_INTERRUPTED,
    EXIT_STDOUT_CLOSED,
    EXIT_TERMINATED,
    PROGRAM,
    report,
    wants_json,
)
from danube_fast.cli.output import StdoutClosed
from danube_fast.cli.security import commands as security
from danube_fast.cli.stored import history, spark_writes, wal
from danube_fast.cli.stored.export import export
from danube_fast.cli.stored.replay import replay
from danube_fast.cli.stored.sql import sql

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name=PROGRAM,
    help="A publish/subscribe message broker for one big host.\n\n\b\nExit codes:\n"
    "  0 done, 1 anything else, 2 usage, 3 not found, 4 refused by the broker, 5 unreachable,\n"
    "  130 Ctrl-C, 141 stdout closed, 143 SIGTERM. With -o json a failure is JSON on stderr:\n"
    '  {"error": {"code": ..., "message": ..., "remedy": ...}}\n',
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
for _command in (
    serve.serve, produce.produce, consume.consume, status.status, doctor.doctor, health.health, demo.demo,
    bench.bench, completion.completion, backup, restore, sql, export, replay,
):  # fmt: skip
    app.command(epilog=_command.epilog)(_command)  # type: ignore[union-attr]
for _module in (
    topic_messages, subscriptions, status, namespaces, wal, history, spark_writes, config, context,
    security,
):  # fmt: skip
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
    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="NAME",
            help="Broker to ask, by its name (at any place).",
            autocompletion=complete_contexts,
        ),
    ] = "",
) -> None:
    """A publish/subscribe message broker for one big host."""


def _take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """`--debug` may stand anywhere before a `--`."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    head = [word for word in words[:end] if word != "--debug"]
    return head + words[end:], len(head) != end


def _take_context(arguments: Sequence[str]) -> tuple[list[str], str]:
    """`--context NAME` may stand anywhere before a `--`, too."""
    words, name = list(arguments), ""
    end = words.index("--") if "--" in words else len(words)
    head, tail = words[:end], words[end:]
    for at in reversed(range(len(head))):
        if head[at] == "--context" and at + 1 < len(head):
            name = head[at + 1]
            del head[at : at + 2]
        elif head[at].startswith("--context="):
            name = head.pop(at).removeprefix("--context=")
    return head + tail, name


def main(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    words, debug = _take_debug(arguments)
    words, name = _take_context(words)
    choose(name)
    try:
        outcome = app(words, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        if outcome == EXIT_INTERRUPTED and interrupts.is_terminated():
            return EXIT_TERMINATED
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
        return report(error, as_json=wants_json(words))


def _open_standard_streams() -> None:
    """Lead closed standard streams to the null device: no file that is opened later takes their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # the lowest descriptor that is free: that of the stream
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def run() -> None:
    """Entry point of the console script."""
    _open_standard_streams()
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
