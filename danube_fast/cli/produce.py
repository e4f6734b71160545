"""`danube-fast produce`: publishes what the command line, a file or a pipe gives."""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from danube_fast.cli.broker import connect
from danube_fast.cli.interrupts import terminable
from danube_fast.cli.options import (
    OutputForm,
    OutputOption,
    TopicArgument,
    TransportOption,
    UrlOption,
    command,
    seconds_of,
)
from danube_fast.cli.output import (
    Progress,
    bytes_text,
    counted,
    note,
    print_result,
)
from danube_fast.cli.records import LINE_END, Record, parse_records
from danube_fast.client.values.arguments import DurabilityLevel
from danube_fast.clock import SECOND_NS, Clock, SystemClock
from danube_fast.errors import DanubeError, InvalidArgument, NotFound
from danube_fast.types import Dispatch

__all__ = ["produce"]

BATCH_MESSAGES = 4096
"""Messages handed to the client at once; a pipe is handed on line by line."""
FLUSH_SECONDS = 60


class InputForm(enum.StrEnum):
    """How a file holds messages."""

    LINES = "lines"
    JSON = "json"
    RAW = "raw"


@command(
    "danube-fast produce /default/hello -m 'hello, world' --key greeting",
    "danube-fast produce /default/log --file app.log --durability os",
    "danube-fast produce /default/reminders -m 'stand up' --deliver-after 10min",
    "tail -f events.jsonl | danube-fast produce /default/events --file - --key-field id",
)
def produce(
    topic: TopicArgument,
    message: Annotated[
        list[str] | None, typer.Option("-m", "--message", metavar="TEXT", help="One message.")
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="PATH|-", help="One message per line; - stdin.")
    ] = None,
    input_form: Annotated[
        InputForm,
        typer.Option(
            "--input",
            help="lines: each is a payload; json: each is what `consume --output json` prints; "
            "raw: the whole file is one message.",
        ),
    ] = InputForm.LINES,
    key: Annotated[str | None, typer.Option(help="Key of every message.")] = None,
    key_field: Annotated[
        str | None, typer.Option(metavar="JSON_FIELD", help="Payloads are JSON; this is the key.")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option("-K", metavar="DELIMITER", help="A line is KEY DELIMITER PAYLOAD.")
    ] = None,
    attribute: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Attribute of every message.")
    ] = None,
    dispatch: Annotated[
        Dispatch | None, typer.Option(help="For a new topic (default reliable).")
    ] = None,
    durability: Annotated[
        DurabilityLevel | None, typer.Option(help="For a new topic (default fsync).")
    ] = None,
    partitions: Annotated[int | None, typer.Option(min=0, help="For a new topic.")] = None,
    deliver_after: Annotated[
        str | None, typer.Option(metavar="SECONDS|10min", help="Consumers get it so much later.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Send everything so many times.")] = 1,
    rate: Annotated[float | None, typer.Option(metavar="MSGS_PER_S", help="Not faster.")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="PRODUCER", help="Name that duplicates are found by.")
    ] = None,
    transport: TransportOption = "auto",
    url: UrlOption = "",
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Publish messages; ends when all are acknowledged."""
    if (message is None) == (file is None):
        raise InvalidArgument("say what to send: either -m TEXT (any number) or --file PATH")
    _check_options([key, key_field, delimiter], rate, repeated_stdin=file == "-" and repeat > 1)
    parsing: dict[str, Any] = {
        "is_json": input_form is InputForm.JSON, "key": key, "key_field": key_field,
        "delimiter": delimiter, "attributes": _attributes(attribute or []),
    }  # fmt: skip
    options = {
        "name": name, "dispatch": dispatch and dispatch.value,
        "durability": durability, "partitions": partitions,
    }  # fmt: skip
    given = {option: value for option, value in options.items() if value is not None}
    with contextlib.ExitStack() as cleanup:
        source = _Source(message, file, input_form, cleanup)
        source.delay_seconds = seconds_of("--deliver-after", deliver_after)
        client = cleanup.enter_context(connect(url, transport))
        producer = cleanup.enter_context(client.producer(topic, **given))
        summary = _Summary(SystemClock(), topic, cleanup.enter_context(Progress()))
        is_lines = repeat == 1 and input_form is not InputForm.RAW
        with _telling(producer, summary, file if is_lines else None):
            for _ in range(repeat):
                _send_all(producer, parse_records(source.lines(), **parsing), source, rate, summary)
            summary.end(producer.flush(timeout=FLUSH_SECONDS))
    print_result(output, summary.as_dict(), summary.as_text(topic))


@contextlib.contextmanager
def _telling(producer: Any, summary: _Summary, path: str | None) -> Iterator[None]:
    """Say how far it came if publishing is interrupted or fails."""
    try:
        with terminable():
            yield
    except KeyboardInterrupt:
        if summary.messages:
            note(f"interrupted: {summary.so_far(producer)}")
        raise
    except DanubeError as error:
        if not summary.messages:
            raise
        raise type(error)(f"{error}; {_how_to_go_on(producer, summary, path)}") from error


def _how_to_go_on(producer: Any, summary: _Summary, path: str | None) -> str:
    """How much was published when a stream failed, and how to publish the rest."""
    with contextlib.suppress(DanubeError):
        producer.flush(timeout=FLUSH_SECONDS)  # what could not be taken has been told
    text = summary.so_far(producer)
    acked = producer.acked_messages
    if path is None or summary.is_partitioned:
        return text
    where = "its input" if path == "-" else path
    return (
        f"{text}; go on behind them with: tail -n +{acked + 1} {where} | danube-fast produce "
        f"{summary.topic} --file - (and the same options)"
    )


def _check_options(
    key_sources: list[str | None], rate: float | None, *, repeated_stdin: bool
) -> None:
    if sum(source is not None for source in key_sources) > 1:
        raise InvalidArgument("--key, --key-field and -K all give a key; choose one of them")
    if rate is not None and not 0 < rate < math.inf:
        raise InvalidArgument("--rate must be a number above 0, in messages per second")
    if repeated_stdin:
        raise InvalidArgument("stdin can be read only once; put it into a file to --repeat it")


def _attributes(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise InvalidArgument(f"{pair!r} is no attribute; write --attribute NAME=VALUE")
        found[name] = value
    return found


class _Source:
    """Where lines come from; `batch_messages` of them are handed on at once."""

    def __init__(
        self,
        messages: list[str] | None,
        path: str | None,
        form: InputForm,
        cleanup: contextlib.ExitStack,
    ) -> None:
        self._messages = messages
        self._raw = form is InputForm.RAW
        self._file: IO[bytes] | None = None
        self.batch_messages = BATCH_MESSAGES
        self.delay_seconds: float | None = None
        """How much later consumers get what is published."""
        if path == "-":
            self._file = sys.stdin.buffer
        elif path is not None:
            self._file = cleanup.enter_context(_open(path))
        if self._file is not None and not _is_regular(self._file):
            self.batch_messages = 1

    def lines(self) -> Iterable[bytes]:
        """Everything, from the beginning."""
        if self._file is None:
            return [text.encode() for text in self._messages or []]
        if self.batch_messages > 1:
            self._file.seek(0)
        if self._raw:
            return [self._file.read()]
        return (line.removesuffix(LINE_END) for line in self._file)


def _open(path: str) -> IO[bytes]:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise NotFound(f"{path} cannot be read ({error.strerror}); check --file") from error


def _is_regular(file: IO[bytes]) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:
        return False


class _Summary:
    """Counts of what was sent, and the time until it was acknowledged."""

    def __init__(self, clock: Clock, topic: str, progress: Progress) -> None:
        self.topic = topic
        self.is_partitioned = False
        self.messages = 0
        self._progress = progress
        self.byte_count = 0
        self.first_offset: int | None = None
        self._last_offset: int | None = None
        self._clock = clock
        self._began_ns = clock.monotonic_ns()
        self._seconds = 0.0

    def add(self, records: list[Record]) -> None:
        self.messages += len(records)
        self.byte_count += sum(len(record.payload or b"") for record in records)
        self._progress.show(f"{self.messages:,} messages, {bytes_text(self.byte_count)}")

    def begin(self, message_id: Any) -> None:
        """Note the id of the first message, which is acknowledged."""
        self.first_offset = message_id.offset
        self.is_partitioned = message_id.topic != self.topic

    def so_far(self, producer: Any) -> str:
        """Say what was acknowledged until now."""
        acked = producer.acked_messages
        if acked == self.messages:
            return f"the {acked:,} messages before it were published and acknowledged"
        # the last batch may have been interrupted before it was counted
        return f"{acked:,} of {max(acked, self.messages):,} messages handed over were acknowledged"

    def end(self, last_id: Any) -> None:
        self._seconds = (self._clock.monotonic_ns() - self._began_ns) / SECOND_NS
        self._last_offset = self.first_offset if last_id is None else last_id.offset

    def as_dict(self) -> dict[str, Any]:
        return {
            "messages": self.messages,
            "bytes": self.byte_count,
            "seconds": round(self._seconds, 6),
            "messages_per_s": round(self.messages / self._seconds, 1) if self._seconds else 0.0,
            "first_offset": self.first_offset,
            "last_offset": self._last_offset,
        }

    def as_text(self, topic: str) -> str:
        if not self.messages:
            return "nothing to send"
        return (
            f"{counted(self.messages, 'message')} ({bytes_text(self.byte_count)}) to {topic} in "
            f"{self._seconds:.3f} s, offsets {self.first_offset} to {self._last_offset}"
        )


def _send_all(
    producer: Any,
    records: Iterator[Record],
    source: _Source,
    rate: float | None,
    summary: _Summary,
) -> None:
    if summary.first_offset is None:
        first = next(records, None)
        if first is None:
            return
        # waits for its ack: the offset is wanted, and what is wrong comes to light at once
        message_id = producer.publish(first.payload, **_fields(first, source))
        summary.begin(message_id)
        summary.add([first])
    pacer = None if rate is None else _Pacer(rate, summary.messages)
    batch_messages = source.batch_messages if pacer is None else 1
    sound = _UntilFault(records)
    while batch := list(itertools.islice(sound, batch_messages)):
        if pacer is not None:
            pacer.wait(summary.messages)
        if len(batch) == 1:
            producer.send(batch[0].payload, **_fields(batch[0], source))
        else:
            producer.send_many([record.payload for record in batch], **_columns(batch, source))
        summary.add(batch)
    if sound.fault is not None:
        raise sound.fault


class _UntilFault:
    """Records before the first that is wrong: they are published, whatever comes behind them."""

    def __init__(self, records: Iterator[Record]) -> None:
        self.fault: InvalidArgument | None = None
        self._records = records

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        try:
            return next(self._records)
        except InvalidArgument as fault:
            self.fault = fault
            raise StopIteration from None


def _fields(record: Record, source: _Source) -> dict[str, Any]:
    values = record._asdict() | {"deliver_after": source.delay_seconds}
    del values["payload"]
    return {name: value for name, value in values.items() if value is not None}


def _columns(batch: list[Record], source: _Source) -> dict[str, Any]:
    """The columns of which at least one message has a value."""
    columns: dict[str, list[Any]] = {
        "keys": [record.key for record in batch],
        "attributes": [record.attributes for record in batch],
        "event_times": [record.event_time for record in batch],
    }
    if source.delay_seconds is not None:
        due_ns = SystemClock().wall_ns() + int(source.delay_seconds * SECOND_NS)
        columns["deliver_at"] = [due_ns] * len(batch)
    return {name: values for name, values in columns.items() if any(v is not None for v in values)}


class _Pacer:
    """Holds a steady rate: message n is due n / rate after the first."""

    def __init__(self, rate: float, sent: int) -> None:
        self._rate = rate
        self._sent = sent
        self._clock = SystemClock()
        self._began_ns = self._clock.monotonic_ns()

    def wait(self, messages: int) -> None:
        due_ns = self._began_ns + int((messages - self._sent + 1) / self._rate * SECOND_NS)
        left_ns = due_ns - self._clock.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / SECOND_NS)
