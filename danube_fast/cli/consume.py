"""`danube-fast consume`: prints the messages of a subscription, and acknowledges what was printed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from danube_fast.cli.broker import connect
from danube_fast.cli.interrupts import Interrupts, terminable
from danube_fast.cli.names import complete_subscriptions, complete_topics
from danube_fast.cli.options import (
    OutputForm,
    OutputOption,
    TransportOption,
    TypeOption,
    UrlOption,
    command,
    seconds_of,
)
from danube_fast.cli.output import Progress, counted, note, write
from danube_fast.cli.records import LINE_END, formatter, json_line, safe_json_line
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DanubeError, InvalidArgument

__all__ = ["FormatOption", "consume", "position_of", "warn_of_gaps", "writer"]

BATCH_MESSAGES = 10_000
POLL_SECONDS = 0.2
"""A signal that comes while it waits for messages is acted on after so long at most."""
INTERRUPTED_SECONDS = 2.0
"""How long Ctrl-C waits to tell which acks arrived."""


FormatOption = Annotated[
    str | None,
    typer.Option(
        "-F",
        "--format",
        metavar="FORMAT",
        help="%t topic, %p partition, %o offset, %k key, %s payload, %h attributes, "
        "%T publish time, %% percent; \\n \\t. Default %s, of peek and tail '%p@%o %k %s'. At a terminal control characters are "
        "written like \\x1b; a pipe gets all as it is, but for keys in the default of peek and tail.",
    ),
]

PatternOption = Annotated[
    str | None,
    typer.Option(metavar="GLOB", help="In place of a topic: all that match, also those to come."),
]
LastOption = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="A new subscription begins with the last N messages."),
]
FiltersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--key-filter",
        metavar="GLOB",
        help="Only keys like this (key_shared); may be repeated.",
    ),
]


@command(
    "danube-fast consume /default/flights --subscription billing --from earliest --max 10",
    "danube-fast consume /default/flights --subscription audit -F '%o %k %s'",
    "danube-fast consume --pattern '/iot/dev-*' --subscription all -F '%t %s'",
)
def consume(
    *,
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="/namespace/topic", autocompletion=complete_topics),
    ] = None,
    subscription: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The cursor that remembers what was read.",
            autocompletion=complete_subscriptions,
        ),
    ],
    pattern: PatternOption = None,
    type_name: TypeOption = "exclusive",
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="latest|earliest|OFFSET|TIME|-10m",
            help="Where a new subscription begins; TIME is RFC 3339.",
        ),
    ] = "latest",
    template: FormatOption = None,
    last: LastOption = None,
    max_messages: Annotated[
        int | None, typer.Option("--max", min=1, metavar="N", help="End after so many messages.")
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="SECONDS|500ms", help="End when nothing has come for so long."),
    ] = None,
    key_filters: FiltersOption = None,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Only look: the messages will come again.")
    ] = False,
    transport: TransportOption = "auto",
    url: UrlOption = "",
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Print messages to stdout as they come, and acknowledge those that were printed."""
    if output is OutputForm.JSON and template is not None:
        raise InvalidArgument("--output json has a form of its own; leave -F out")
    if (topic is None) == (pattern is None):
        raise InvalidArgument("name a topic, or give --pattern; not both")
    if last is not None and start != "latest":
        raise InvalidArgument("give --from or --last, not both")
    position = position_of(start) if last is None else {"last": last}
    write_batch = writer(output, template)
    options: dict[str, Any] = {"key_filters": key_filters} if key_filters else {}
    if pattern is not None:
        options["pattern"] = pattern
    quiet_seconds = seconds_of("--timeout", timeout)
    if quiet_seconds is not None:
        options["timeout"] = quiet_seconds
    printed = _Printed(topic or str(pattern), acknowledge=not no_ack)
    options |= {"subscription": subscription, "type": type_name, "initial_position": position}
    with (
        connect(url, transport) as client,
        client.consumer(topic, **options) as consumer,
    ):
        _consume_from(
            consumer,
            printed,
            functools.partial(_pump, consumer, write_batch, max_messages, quiet_seconds, printed),
        )
    note(printed.as_text())


def _consume_from(consumer: Any, printed: _Printed, pump: Callable[[Interrupts], None]) -> None:
    """Pump, and say what was acknowledged if that is interrupted or fails."""
    try:
        with terminable() as interrupts:
            pump(interrupts)
    except KeyboardInterrupt:
        if printed.messages:
            note(f"interrupted: {printed.flushed(consumer, INTERRUPTED_SECONDS)}")
        raise
    except DanubeError as error:
        if not printed.messages:
            raise
        told = printed.flushed(consumer, INTERRUPTED_SECONDS)
        raise type(error)(f"{error}; {told}; run it again to go on") from error


class _Printed:
    """Messages of a subscription that were printed, and what became of their acks."""

    def __init__(self, where: str, *, acknowledge: bool) -> None:
        self.messages = 0
        self.acknowledge = acknowledge
        self._where = where

    def as_text(self) -> str:
        return f"{counted(self.messages, 'message')} from {self._where}"

    def flushed(self, consumer: Any, seconds: float) -> str:
        """Wait a while for the acks of what was printed; what became of them."""
        if not self.acknowledge:
            return f"{self.as_text()} printed, none acknowledged"
        try:
            consumer.flush_acks(timeout=seconds)
        except DanubeError:
            return f"{self.as_text()} printed; not all acks arrived, so some may come again"
        return f"{self.as_text()} printed and acknowledged"


def position_of(text: str) -> str | int:
    """Return the position that `--from` says. Raises InvalidArgument."""
    from danube_fast.client.values.options import checked_position

    position = int(text) if text.isascii() and text.isdecimal() else text
    checked_position(position)
    return position


def writer(output: OutputForm, template: str | None, own: str = "%s") -> Callable[[Any], bytes]:
    """Return what turns a batch into bytes, by default in the command's `own` format; payloads alone never look at single
    messages. Messages must not steer a terminal."""
    at_terminal = sys.stdout.isatty()
    if output is OutputForm.JSON:
        line = safe_json_line if at_terminal else json_line
        return lambda batch: b"".join(map(line, batch))
    if template is None and own == "%s" and not at_terminal:
        return lambda batch: LINE_END.join([*(p or b"" for p in batch.payloads()), b""])
    one = formatter(template or own, is_own=template is None, at_terminal=at_terminal)
    return lambda batch: b"".join(map(one, batch))


def warn_of_gaps(consumer: Any) -> None:
    """Say on stderr which messages will never come."""
    gaps = getattr(consumer, "gaps", None)
    while gaps:
        gap = gaps.popleft()
        note(f"warning: offsets {gap.first} to {gap.last} of {gap.topic} never come: {gap.reason}")


def _pump(
    consumer: Any,
    write_batch: Callable[[Any], bytes],
    max_messages: int | None,
    timeout: float | None,
    printed: _Printed,
    interrupts: Interrupts,
) -> None:
    """Receive, print, acknowledge, until one of the limits is reached. Only printing can be interrupted: half an
    ack would be told as none, or as one."""
    clock = SystemClock()
    heard_ns = clock.monotonic_ns()
    with Progress(beside_stdout=True) as progress:
        while max_messages is None or printed.messages < max_messages:
            wait = POLL_SECONDS
            if timeout is not None:
                quiet = (clock.monotonic_ns() - heard_ns) / SECOND_NS
                wait = min(POLL_SECONDS, max(timeout - quiet, 0.0))
            wanted = BATCH_MESSAGES if max_messages is None else max_messages - printed.messages
            with interrupts.held():
                batch = consumer.receive_batch(min(BATCH_MESSAGES, wanted), timeout=wait)
            now_ns = clock.monotonic_ns()
            warn_of_gaps(consumer)
            if len(batch):
                write(write_batch(batch))
                with interrupts.held():
                    if printed.acknowledge:
                        consumer.ack(batch)
                    printed.messages += len(batch)
                progress.show(printed.as_text())
                heard_ns = now_ns
            elif timeout is not None and now_ns - heard_ns >= timeout * SECOND_NS:
                break
    if printed.acknowledge:
        with interrupts.held():
            consumer.flush_acks()
