"""`danube-fast history`: looks into history in an object store, and repairs its manifests, where no broker is needed;
and asks a running broker to upload a topic, and to hold what is in the store."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.options import (
    OutputForm,
    OutputOption,
    TopicArgument,
    YesOption,
    example,
    group,
    seconds_option,
)
from danube_fast.cli.output import (
    Progress,
    bytes_text,
    counted,
    print_result,
    print_table,
    time_text,
    write,
)
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DataLoss, InvalidArgument, NotFound

if TYPE_CHECKING:
    from danube_fast.history.audit import Verification
    from danube_fast.history.catalog import Catalog, Damage, PartitionHistory
    from danube_fast.history.repair import Found, PartitionRepair, Repair
    from danube_fast.history.stores.store import ObjectStore

__all__ = ["app", "opened_store"]

STORE = "s3://bucket/prefix"
HOLD = "holds/001767225600000-0123456789abcdef"
WAIT_SECONDS = 60

app = group(
    "history",
    "Look into history in an object store, and repair it.",
    f"danube-fast history ls --store {STORE}",
)

StoreOption = Annotated[
    str, typer.Option("--store", metavar="URL", help="Store: file:///folder or s3://bucket/prefix.")
]
HoldArgument = Annotated[
    str, typer.Argument(metavar="HOLD", help="What the flush, or the last renewal, has answered.")
]
OfTopicOption = Annotated[
    str | None,
    typer.Option(
        "--topic", help="The topic that was flushed: a secured broker asks for the right to it."
    ),
]
TopicFilter = Annotated[
    str | None, typer.Argument(metavar="TOPIC", help="Only this one: /namespace/topic")
]


@app.command(name="ls", epilog=example(f"danube-fast history ls --store {STORE}"))
def list_history(
    store: StoreOption, topic: TopicFilter = None, output: OutputOption = OutputForm.TEXT
) -> None:
    """List partitions with history: how much there is, which offsets, from when until when."""
    with opened_store(store) as opened, Progress() as progress:
        catalog = _read(opened, progress)
    chosen = sorted(
        catalog.of_topic(topic), key=lambda each: (each.manifest.topic, each.partition_id)
    )
    if topic is not None and not chosen and not catalog.damages:
        raise _missing(store, topic)
    if chosen or not catalog.damages or output is OutputForm.JSON:
        print_table(output, [_row(each) for each in chosen], f"no history in {store}")
    _fail_for(store, catalog.damages)


@asking(app, "danube-fast history flush /default/flights --hold-seconds 3600")
def flush(
    ask: Ask,
    topic: TopicArgument,
    hold_seconds: Annotated[
        int,
        seconds_option(
            "Keep its objects for so long, for readers that have the store alone.", 0, whole=True
        ),
    ] = 0,
    wait_seconds: Annotated[
        int, seconds_option("How long the upload may take.", 1, whole=True)
    ] = WAIT_SECONDS,
) -> None:
    """Upload all messages of a topic up to now; asks a running broker."""
    timeout_ms = 1000 * wait_seconds
    longer = {"timeout": wait_seconds + 10} if wait_seconds > WAIT_SECONDS else {}
    ask.show(
        ask(
            "flush_history", topic=topic, hold_seconds=hold_seconds, timeout_ms=timeout_ms, **longer
        )
    )


@asking(app, f"danube-fast history renew {HOLD} --hold-seconds 3600")
def renew(
    ask: Ask,
    hold: HoldArgument,
    hold_seconds: Annotated[
        int, seconds_option("Keep its objects for so long from now on.", 1, whole=True)
    ],
    topic: OfTopicOption = None,
) -> None:
    """Hold objects of the store for longer; prints the hold that takes the place of the old one."""
    ask.show(ask("renew_history_hold", hold=hold, hold_seconds=hold_seconds, topic=topic))


@asking(app, f"danube-fast history release {HOLD}")
def release(ask: Ask, hold: HoldArgument, topic: OfTopicOption = None) -> None:
    """Give held objects back: they may be deleted. One that is gone already is no error."""
    ask.show(ask("release_history_hold", hold=hold, topic=topic), f"released {hold}")


@app.command(
    epilog=example(
        f"danube-fast history describe --store {STORE} /default/flights",
        f"danube-fast history describe --store {STORE} 17 --objects",
    )
)
def describe(
    store: StoreOption,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC|PARTITION_ID", help="/namespace/topic, or a number.")
    ],
    objects: Annotated[
        bool, typer.Option("--objects", help="Name each object, and what it holds.")
    ] = False,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Show the manifest of each partition of a topic, or of one partition."""
    damages: list[Damage] = []
    with opened_store(store) as opened, Progress() as progress:
        if topic.isdecimal():
            from danube_fast.history.catalog import load_partition

            chosen = [load_partition(opened, int(topic))]
            chosen = [each for each in chosen if each.identity]
        else:
            catalog = _read(opened, progress)
            chosen, damages = catalog.of_topic(topic), catalog.damages
    if not chosen and not damages:
        raise _missing(store, f"partition {topic}" if topic.isdecimal() else topic)
    described = [_described(each, objects) for each in chosen]
    if output is OutputForm.JSON:
        print_result(output, described)
    for place, each in enumerate(described if output is OutputForm.TEXT else []):
        if place:
            write(b"\n")
        print_result(output, each)
    _fail_for(store, damages)


@app.command(
    epilog=example(
        f"danube-fast history verify --store {STORE}",
        f"danube-fast history verify --store {STORE} /default/flights",
    )
)
def verify(
    store: StoreOption, topic: TopicFilter = None, output: OutputOption = OutputForm.TEXT
) -> None:
    """Check every byte of history, and what manifests say of it; exit code 1 if something is damaged."""
    from danube_fast.history.audit import verify_history

    with opened_store(store) as opened, Progress() as progress:
        report = verify_history(opened, topic, _shown_by(progress, store))
    print_result(output, msgspec.to_builtins(report), "\n".join(_verified(report)))
    if report.damages:
        raise DataLoss(
            f"{counted(len(report.damages), 'damage')} in {store}; do what stands behind each, then "
            "verify again"
        )


@app.command(
    epilog=example(
        f"danube-fast history repair --store {STORE}",
        f"danube-fast history repair --store {STORE} --adopt 17 --yes",
    )
)
def repair(
    store: StoreOption,
    adopt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PARTITION_ID[=TOPIC]",
            help="Name objects that no manifest of this partition names, behind its end, too.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done, as without --yes.")
    ] = False,
    yes: YesOption = False,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Make manifests anew that are damaged, of what is left; stop the broker first. Nothing is deleted."""
    from danube_fast.history.repair import repair_history

    if dry_run and yes:
        raise InvalidArgument("--dry-run and --yes were both given; leave one of them out")
    adopted = dict(_adopted(text) for text in adopt or [])
    with opened_store(store, is_written=yes) as opened, Progress() as progress:
        report = repair_history(
            opened, adopted, SystemClock().wall_ns(), is_dry=not yes,
            on_progress=_shown_by(progress, store),
        )  # fmt: skip
    print_result(output, msgspec.to_builtins(report), "\n".join(_repaired(report)))
    if report.partitions and not yes:
        raise DataLoss(
            f"{counted(len(report.partitions), 'partition')} of {store} can be repaired; stop the broker, "
            "then add --yes to do it"
        )
    if report.damages:
        raise DataLoss(
            f"{counted(len(report.damages), 'damage')} in {store} cannot be repaired, and readers are told; do "
            "what stands behind each"
        )


def _adopted(text: str) -> tuple[int, str]:
    number, _, topic = text.partition("=")
    if not number.isdecimal():
        raise typer.BadParameter(f"--adopt {text!r} is not PARTITION_ID or PARTITION_ID=TOPIC")
    return int(number), topic


@contextlib.contextmanager
def opened_store(url: str, *, is_written: bool = False) -> Iterator[ObjectStore]:
    """Open the store of a URL, which must be there, for reading unless `is_written`, and close it."""
    from danube_fast.history.stores.opening import open_store

    with tempfile.TemporaryDirectory(prefix="danube-fast-") as scratch:
        opened = open_store(url, SystemClock(), Path(scratch), must_exist=True)
        if is_written:
            opened.close()
            opened = open_store(url, SystemClock(), Path(scratch))
        try:
            yield opened
        finally:
            opened.close()


def _read(store: ObjectStore, progress: Progress) -> Catalog:
    from danube_fast.history.catalog import read_catalog

    return read_catalog(store, _shown_by(progress, store.url))


def _shown_by(progress: Progress, url: str) -> Any:
    def show(unit: str, done: int, total: int) -> None:
        if unit == "bytes":
            progress.show(f"{url}: {bytes_text(done)} of {bytes_text(total)} checked")
        else:
            progress.show(f"{url}: {done} of {total} {unit} read")

    return show


def _missing(url: str, what: str) -> NotFound:
    return NotFound(f"{url} has no history of {what}; `danube-fast history ls` lists it")


def _fail_for(url: str, damages: list[Damage]) -> None:
    """Raise DataLoss if manifests cannot be trusted: the first of them, with its remedy."""
    if not damages:
        return
    first = damages[0]
    others = f", and {len(damages) - 1} more" if len(damages) > 1 else ""
    raise DataLoss(f"{url}: {first.key}: {first.reason}{others}; {first.remedy}")


# ---------------------------------------------------------------- what is printed


def _row(partition: PartitionHistory) -> dict[str, Any]:
    manifest = partition.manifest
    sections = manifest.sections
    return {
        "topic": manifest.topic,
        "partition_id": partition.partition_id,
        "messages": sum(section.message_count for section in sections),
        "bytes": sum(section.byte_count for section in sections),
        "first_offset": manifest.first_offset,
        "end_offset": manifest.end_offset,
        "objects": len({section.key for section in sections}),
        "from_ns": min((section.append_min_ns for section in sections), default=None),
        "until_ns": max((section.append_max_ns for section in sections), default=None),
        "record": manifest.number,
    }


def _described(partition: PartitionHistory, with_objects: bool) -> dict[str, Any]:
    manifest = partition.manifest
    found = {
        **_row(partition),
        "snapshot": manifest.snapshot,
        "incarnation": manifest.incarnation,
        "owner_epoch": manifest.owner_epoch,
        "uploader_epoch": manifest.uploader_epoch,
        "identity": partition.identity.hex(),
    }
    if with_objects:
        found["sections"] = [
            {
                "object": section.key,
                "base_offset": section.base_offset,
                "end_offset": section.end_offset,
                "messages": section.message_count,
                "bytes": section.byte_count,
                "from_ns": section.append_min_ns,
                "until_ns": section.append_max_ns,
            }
            for section in manifest.sections
        ]
    return found


def _verified(report: Verification) -> list[str]:
    lines = [f"DAMAGE {_damage_text(damage)}" for damage in report.damages]
    lines += [
        f"orphan {orphan.key}: {bytes_text(orphan.bytes)}, made {time_text(orphan.made_ns)}; no "
        "manifest names it, nothing was deleted"
        for orphan in report.orphans or []
    ]
    checked = ", ".join(
        (
            counted(report.partitions, "partition"),
            counted(report.objects, "object"),
            counted(report.messages, "message"),
            bytes_text(report.bytes),
        )
    )
    health = counted(len(report.damages), "damage") if report.damages else "sound"
    orphans = "" if report.orphans is None else f", {counted(len(report.orphans), 'orphan')}"
    return [*lines, f"{report.store}: {checked}: {health}{orphans}"]


def _damage_text(damage: Damage) -> str:
    """Write damage as one line: the object, the offsets, what is wrong, what to do."""
    place = ""
    if damage.partition_id is not None:
        topic = f"{damage.topic} " if damage.topic else ""
        place = f" {topic}partition {damage.partition_id}"
    if damage.base_offset is not None:
        place += f" offsets {damage.base_offset} to {damage.end_offset}"
    return " ".join(f"{damage.key}:{place}: {damage.reason}; {damage.remedy}".split())


def _repaired(report: Repair) -> list[str]:
    lines = [line for each in report.partitions for line in _partition_lines(each)]
    lines += [f"DAMAGE {_damage_text(damage)}" for damage in report.damages]
    lines += [
        f"unnamed {each.key}: offsets {each.base_offset} to {each.end_offset} of partition "
        f"{each.partition_id}; no manifest names them: if its newest records are lost, or all of them, "
        f"and its topic was not deleted, add --adopt {each.partition_id}"
        for each in report.unnamed
    ]
    lines += _hold_lines(report)
    count = counted(len(report.partitions), "partition")
    done = f"{count} repaired" if report.is_done else f"{count} to be repaired"
    if not report.partitions:
        done = "nothing to repair"
    damages = f", {counted(len(report.damages), 'damage')}" if report.damages else ""
    return [*lines, f"{report.store}: {done}{damages}"]


def _hold_lines(report: Repair) -> list[str]:
    from danube_fast.history.repair import HOLD_SECONDS

    if not report.held:
        return []
    objects = counted(report.held, "object")
    if not report.is_done:
        days = counted(HOLD_SECONDS // (24 * 3600), "day")
        return [
            f"hold {objects} for {days}: a broker deletes what no manifest names, without --yes"
        ]
    until = time_text(report.expires * SECOND_NS)
    release = f"danube-fast history release {report.hold}"
    return [
        f"held {objects} until {until}: no broker deletes them before, unless you say `{release}`"
    ]


def _partition_lines(repair: PartitionRepair) -> list[str]:
    topic = repair.topic or "topic unknown,"
    head = f"repair {topic} partition {repair.partition_id}: {'; '.join(repair.reasons)}"
    unknown = f"  no record tells its topic, and no broker takes it without: add --adopt {repair.partition_id}=TOPIC"
    return [
        head,
        *([] if repair.topic else [unknown]),
        *(f"  name {each.key}: {_offsets(each)}" for each in repair.named),
        *(f"  copy from {each.key}: {_offsets(each)}" for each in repair.copied),
        *(f"  LOST offsets {base} to {end}" for base, end in repair.lost),
        (
            f"  record {repair.record} tells of offsets {repair.first_offset} to {repair.end_offset}; "
            f"{counted(repair.put_aside, 'record')} put aside"
        ),
    ]


def _offsets(found: Found) -> str:
    return f"offsets {found.base_offset} to {found.end_offset}"
