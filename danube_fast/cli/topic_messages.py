"""`danube-fast topics peek | tail | purge`: the messages of a topic, whatever its subscriptions are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.consume import FormatOption, position_of, warn_of_gaps, writer
from danube_fast.cli.options import (
    OutputForm,
    TopicArgument,
    YesOption,
)
from danube_fast.cli.output import refuse_without_yes, write
from danube_fast.cli.topics import app
from danube_fast.errors import InvalidArgument

__all__ = ["app"]

SHOWN = "%p@%o %k %s"
"""Partition, offset, key, payload."""
POLL_SECONDS = 1.0

CountOption = Annotated[
    int, typer.Option("-n", "--count", min=1, metavar="N", help="As many messages.")
]


def _writer(output: OutputForm, template: str | None) -> Any:
    """Return what turns messages into bytes. Raises InvalidArgument."""
    if output is OutputForm.JSON and template is not None:
        raise InvalidArgument("--output json has a form of its own; leave -F out")
    return writer(output, template, SHOWN)


@asking(
    app,
    "danube-fast topics peek /default/flights -n 3",
    "danube-fast topics peek /default/flights --from 100 -F '%T %s'",
)
def peek(
    ask: Ask,
    topic: TopicArgument,
    count: CountOption = 10,
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="earliest|OFFSET|TIME|-10m", help="Where to look; TIME is RFC 3339."
        ),
    ] = "earliest",
    template: FormatOption = None,
) -> None:
    """Show messages from a position on; no subscription moves, and none is made."""
    position, write_batch = position_of(start), _writer(ask.form, template)
    with ask.connect() as client:
        write(write_batch(client.admin.peek(topic=topic, count=count, position=position)))


@asking(app, "danube-fast topics tail /default/flights -n 3 --follow")
def tail(
    ask: Ask,
    topic: TopicArgument,
    count: CountOption = 10,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as messages come.")] = False,
    template: FormatOption = None,
) -> None:
    """Show the last messages; no subscription moves, and none is made."""
    write_batch = _writer(ask.form, template)
    with ask.connect() as client:
        if not follow:
            write(write_batch(client.admin.tail(topic=topic, count=count)))
            return
        client.admin.describe_topic(topic=topic)  # a missing topic fails at once
        with client.reader(topic, start={"last": count}, stop=None) as reader:
            while True:
                batch = reader.receive_batch(timeout=POLL_SECONDS)
                warn_of_gaps(reader)
                if len(batch):
                    write(write_batch(batch))


@asking(app, "danube-fast topics purge /default/flights --yes")
def purge(ask: Ask, topic: TopicArgument, yes: YesOption = False) -> None:
    """Drop everything published so far, for all subscriptions; they stay, and go on behind it."""
    refuse_without_yes(yes, f"drops all messages of {topic}, read or not, for all subscriptions")
    gone = ask("purge_topic", topic=topic)
    ask.show(gone, f"purged {topic}: {gone.get('purged', 0):,} messages")
