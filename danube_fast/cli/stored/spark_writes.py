"""`danube-fast spark writes`: writes of Spark that a store knows; to end one that its driver has left, no Spark is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from danube_fast.cli.broker import Ask, asking, reach
from danube_fast.cli.options import YesOption, group
from danube_fast.cli.output import counted, refuse_without_yes
from danube_fast.cli.stored.history import opened_store
from danube_fast.clock import SystemClock
from danube_fast.errors import DanubeError, DataLoss, FailedPrecondition, NotFound

if TYPE_CHECKING:
    from danube_fast.history.stores.store import ObjectStore
    from danube_fast.spark.write.record import BatchState

__all__ = ["app"]

ACK_SECONDS = 300
"""How long a frame may wait for its ack."""

app = group("spark", "Look after what Spark writes.", "danube-fast spark writes ls")
_writes = group(
    "writes",
    "Writes of Spark: what is staged, committed, published.",
    "danube-fast spark writes ls",
)
app.add_typer(_writes)

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="Store where rows are staged.  [default: the broker's]"
    ),
]
WriteIdArgument = Annotated[str, typer.Argument(metavar="WRITE_ID", help="As `ls` shows it.")]


@asking(
    _writes,
    "danube-fast spark writes ls",
    "danube-fast spark writes ls --store s3://bucket/prefix -o json",
    name="ls",
)
def list_writes(ask: Ask, store: StoreOption = None) -> None:
    """List writes: done, committed (some rows may be published), staged (none are), doubtful."""
    from danube_fast.spark.write.record import list_batches

    with opened_store(_url(ask, store)) as opened:
        found = (_row(opened, each) for each in list_batches(opened))
        rows = [row for row in found if row is not None]
        ask.table(rows, f"no writes in {opened.url}")


@asking(
    _writes, "danube-fast spark writes resume", "danube-fast spark writes resume nightly-2026-01-01"
)
def resume(
    ask: Ask,
    write_id: Annotated[
        str | None,
        typer.Argument(metavar="[WRITE_ID]", help="As `ls` shows it.  [default: all that wait]"),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Publish what is committed and not published, each row once; ends a driver that goes on with the same."""
    from danube_fast.spark.write.options import check_write_id
    from danube_fast.spark.write.publishing import BrokerLink, finish_batch
    from danube_fast.spark.write.record import list_batches

    if write_id is not None:
        check_write_id(write_id)
    with opened_store(_url(ask, store), is_written=True) as opened:
        batches = list_batches(opened, write_id or "")
        if write_id is not None and not batches:
            raise _unknown(opened, write_id)
        if write_id is not None and all(each.state == "staged" for each in batches):
            raise FailedPrecondition(
                f"{write_id} is not committed, so nothing says which rows count; run its job again, or remove them "
                f"with `danube-fast spark writes abort {write_id}`"
            )
        for each in batches:
            if each.state == "done":
                opened.delete(each.staged)  # of a task that came late
        pending = [each for each in batches if each.is_pending]
        rows = []
        failed: DanubeError | None = None
        for each in pending:
            try:
                url, access = reach(ask.url)
                with BrokerLink(url, ACK_SECONDS, access) as link:
                    count = finish_batch(link, opened, each)
            except DanubeError as error:
                failed = failed or error  # the others may go
                continue
            rows.append({"write_id": each.write_id, "batch": each.batch, "published": count})
    if rows or failed is None:
        ask.table(rows, "nothing waits to be published")
    if failed is not None:
        raise failed


@asking(
    _writes,
    "danube-fast spark writes abort nightly-2026-01-01",
    "danube-fast spark writes abort nightly-2026-01-01 --yes",
)
def abort(
    ask: Ask, write_id: WriteIdArgument, store: StoreOption = None, yes: YesOption = False
) -> None:
    """Forget a write: what is staged goes, what is published stays; a job with the same id begins anew."""
    from danube_fast.spark.write.options import check_write_id
    from danube_fast.spark.write.publishing import forget_write
    from danube_fast.spark.write.record import list_batches

    check_write_id(write_id)
    with opened_store(_url(ask, store), is_written=True) as opened:
        batches = list_batches(opened, write_id)
        if not batches:
            raise _unknown(opened, write_id)
        refuse_without_yes(yes, _warning(write_id, batches))
        forget_write(opened, write_id)
        ask.show({"write_id": write_id, "batches": len(batches)}, f"forgot {write_id}")


def _warning(write_id: str, batches: Sequence[BatchState]) -> str:
    objects = counted(sum(len(each.staged) for each in batches), "staged object")
    if any(each.is_pending for each in batches):
        return (
            f"forgets {write_id}, of which some rows may be published and others not, and deletes {objects}: those are "
            "never published, and a job with the same id publishes all of its rows"
        )
    return f"forgets {write_id} and deletes {objects}: a job with the same id publishes all of its rows"


def _row(store: ObjectStore, state: BatchState) -> dict[str, Any] | None:
    """The line that `ls` shows of a batch; None: a driver has swept it just now."""
    from danube_fast.spark.write.record import read_commit, read_done

    topic: str | None = None
    rows: int | None = None
    word = state.state
    try:
        if state.is_done:
            done = read_done(store, state.write_id, state.batch)
            topic, rows = done.topic, done.rows
        elif state.is_committed:
            commit = read_commit(store, state.write_id, state.batch)
            topic, rows = commit.topic, sum(commit.row_counts)
    except NotFound:
        return None
    except DataLoss:
        word = "damaged"
    age_ns = max(0, SystemClock().wall_ns() - state.modified_ns)
    return {
        "write_id": state.write_id, "batch": state.batch, "topic": topic, "state": word, "rows": rows,
        "staged_bytes": state.staged_bytes, "age_s": age_ns // 1_000_000_000,
    }  # fmt: skip


def _unknown(store: ObjectStore, write_id: str) -> DanubeError:
    return NotFound(
        f"{store.url} knows no write {write_id}; `danube-fast spark writes ls` lists them"
    )


def _url(ask: Ask, url: str | None) -> str:
    """The store that was named, or that of the broker."""
    found = url or (ask("cluster_status").get("history") or {}).get("store")
    if not found:
        raise FailedPrecondition(
            "the broker has no store; name the one that the write had as option staging: --store URL"
        )
    return str(found)
