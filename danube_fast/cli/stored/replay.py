"""`danube-fast replay`: what a topic or a table had, published to a topic, at full speed or at a pace."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from danube_fast.cli.contexts.context_file import complete_contexts, values_of
from danube_fast.cli.interrupts import terminable
from danube_fast.cli.names import complete_topics
from danube_fast.cli.options import DEFAULT_URL, OutputForm, OutputOption, command
from danube_fast.cli.output import Progress, bytes_text, counted, note, print_result
from danube_fast.cli.stored.options import BROKER_DEFAULT, EndOption, StartOption, StoreOption
from danube_fast.errors import InvalidArgument

if TYPE_CHECKING:
    from danube_fast.spark.replay.run import Outcome

__all__ = ["replay"]


IdOption = Annotated[
    str | None,
    typer.Option(
        "--id",
        metavar="ID",
        help="A replay that was cut short goes on under its id.  [default: one of these options]",
    ),
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder for the record of how far it is.  [default: ~/.local/state/danube-fast/replays]",
    ),
]
ToContextOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="In place of --to-url: broker of the target and the way in there, as `danube-fast context` has them.",
        autocompletion=complete_contexts,
        show_default=False,
    ),
]
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A topic, or parquet:DIR with the columns of a topic.",
        autocompletion=complete_topics,
    ),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="The topic to publish to, which has to be there.",
        autocompletion=complete_topics,
    ),
]
SpeedOption = Annotated[
    float | None,
    typer.Option(metavar="N", help="N times the original pace.  [default: at full speed]"),
]
ByOption = Annotated[
    Literal["publish_time", "event_time"],
    typer.Option(help="The times that pace and order go by."),
]
ToUrlOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Broker of the target.  [default: that of the source]"),
]


@command(
    "danube-fast topics create /default/flights-again --partitions 4",
    "danube-fast replay /default/flights /default/flights-again",
    "danube-fast replay /default/flights /default/test --start 2026-01-01T00:00:00Z --speed 10",
    "danube-fast replay parquet:flights /default/flights --speed 1 --by event_time",
    "danube-fast replay /default/flights /default/copy --url danube://old:6650 --to-url danube://new:6650",
    "danube-fast replay /default/flights /default/copy --to-context new",
)
def replay(
    source: SourceArgument,
    target: TargetArgument,
    start: StartOption = None,
    end: EndOption = None,
    speed: SpeedOption = None,
    by: ByOption = "publish_time",
    replay_id: IdOption = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            envvar="DANUBE_URL",
            metavar="URL",
            help=f"Broker of the source.  {BROKER_DEFAULT}",
        ),
    ] = None,
    to_url: ToUrlOption = None,
    to_context: ToContextOption = "",
    store: StoreOption = None,
    checkpoint: CheckpointOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be published, and publish nothing.")
    ] = False,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Publish again what a topic or a table had; needs pip install 'danube-fast[arrow]', no Java.

    Key, payload, attributes and event time are kept. Partition i goes to partition i if source and target have
    equally many; else messages go by key. A replay that was cut short goes on when the same command is run again,
    and publishes nothing twice.

    A topic is read through an object store: its broker runs with one (danube-fast serve --store URL), and this
    command reads it, too, with credentials of its own and the extra of that store ('danube-fast[arrow,s3]', azure,
    gcs). Topics of durability memory and non_reliable ones cannot be read so. Neither parquet:DIR nor the target
    needs a store.
    """
    from danube_fast.spark.replay.run import Replay
    from danube_fast.spark.replay.run import replay as run_replay

    if to_context:
        to_url = _url_of(to_context, to_url)
    asked = Replay(
        source, target, start, end, speed, by, replay_id, url, to_url, store, checkpoint, dry_run
    )
    with terminable(), Progress() as progress:

        def show(done: int, total: int, byte_count: int) -> None:
            part = f"{done / total:.0%}" if total else "all"
            progress.show(f"{part} of {total:,} messages, {bytes_text(byte_count)} published")

        try:
            outcome = run_replay(
                asked,
                connect=_connect,
                connect_target=partial(_connect, context=to_context),
                on_progress=show,
            )
        except KeyboardInterrupt:
            note("interrupted: the same command goes on behind what was acked")
            raise
    if not outcome.is_resumable:
        note(f"{target} is non_reliable and counts nothing: a replay that is cut short begins anew")
    print_result(output, _as_dict(asked, outcome), _as_text(asked, outcome))


def _url_of(context: str, url: str | None) -> str:
    """Return the address that a context has, as the id of the replay depends on it. Raises InvalidArgument, NotFound."""
    if url:
        raise InvalidArgument(
            "--to-url and --to-context both name the broker of the target; leave one of them out"
        )
    return values_of(context)["url"].text or DEFAULT_URL


def _connect(url: str | None, context: str = "") -> Any:
    from danube_fast.cli.broker import connect

    return connect(url or "", context=context)


def _as_dict(asked: Any, outcome: Outcome) -> dict[str, Any]:
    seconds = outcome.seconds
    return {
        "id": outcome.replay_id,
        "source": asked.source,
        "target": asked.target,
        "messages": outcome.messages,
        "bytes": outcome.byte_count,
        "seconds": round(seconds, 6),
        "messages_per_s": round(outcome.messages / seconds, 1) if seconds else 0.0,
        "published_before": outcome.skipped,
        "routing": "by key" if outcome.is_by_key else "by partition",
        "ranges": outcome.ranges,
        "dry_run": asked.is_dry,
    }


def _as_text(asked: Any, outcome: Outcome) -> str:
    total = sum(each["end"] - each["start"] for each in outcome.ranges)
    how = "by key" if outcome.is_by_key else "partition by partition"
    if asked.is_dry:
        parts = ", ".join(f"{e['partition']}: {e['start']} to {e['end']}" for e in outcome.ranges)
        before = f"; {outcome.skipped:,} of them are there" if outcome.skipped else ""
        return (
            f"would publish about {counted(total, 'message')} of {asked.source} to {asked.target}, {how}{before} (id "
            f"{outcome.replay_id}; positions by partition {parts})"
        )
    if not total:
        return f"{asked.source} has nothing in this range: nothing to publish"
    before = f", behind {outcome.skipped:,} that were published before" if outcome.skipped else ""
    if not outcome.messages:
        return (
            f"all {outcome.skipped:,} messages were published before, under the id {outcome.replay_id}; another --id "
            "publishes them once more"
        )
    rate = outcome.messages / outcome.seconds if outcome.seconds else 0.0
    return (
        f"{counted(outcome.messages, 'message')} ({bytes_text(outcome.byte_count)}) to {asked.target}{before}, in "
        f"{outcome.seconds:.3f} s, {rate:,.0f}/s, {how} (id {outcome.replay_id})"
    )
