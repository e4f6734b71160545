"""The workload `sustained`: gigabytes through the log, and then the same disk without a broker.

    producer -> broker -> consumer          bytes/s that went into the log       first send to last receive
    pwrite, fdatasync, pwrite, ...          bytes/s of groups as large           bench/workloads/bare.py

`vs_bare_writes` is the first divided by the second. Both write the same number of bytes into files that
were written before, on the same file system, in groups of the same mean size (bytes per sync, as the
broker counted them). What a consumer has read goes at once and its segment is used again; the log may
take so much on disk and no more: then its publishes wait for the consumer.
"""

from __future__ import annotations

import shutil

import msgspec

from danube_fast.bench.load.processes import HEAR_SECONDS
from danube_fast.bench.load.rig import WORKERS, Rig
from danube_fast.bench.plan import WARM_SETTINGS, Figures, Plan
from danube_fast.bench.workloads import bare, rates
from danube_fast.config import Settings
from danube_fast.errors import Internal, ResourceExhausted
from danube_fast.wal.layout import GROUP_ALIGNMENT

__all__ = ["long_plan", "room_bytes", "run_sustained"]

PREPARED_BYTES = 256_000_000
"""Made before the clock starts and sent in turn: both ends hold objects of them besides."""
BEHIND_BYTES_MAX = 4_000_000_000
"""The log may hold so much that the consumer has not read; then publishes wait."""
SEGMENTS_BESIDE_SPARES = 4
"""Of each log: the one being written, those that wait for their retention and a snapshot."""
REST_SECONDS = 60.0
"""Zeroing all spare segments, at 128 MB/s a worker, takes 9 s where the disk keeps up."""
SLOWEST_BYTES_PER_S = 10_000_000


def long_plan(plan: Plan) -> Plan:
    """The plan with as many messages as fill `log_bytes` by their payloads alone, in whole passes of what
    is prepared, and a broker whose data directory stays bounded."""
    wanted = max(1, -(-plan.log_bytes // plan.message_bytes))
    passes = -(-wanted * plan.message_bytes // PREPARED_BYTES)
    prepared = -(-wanted // passes)
    segment_bytes = Settings().segment_bytes
    spares = min(WARM_SETTINGS["spare_segments"], plan.log_bytes // segment_bytes + 2)
    standing_bytes = WORKERS * (spares + SEGMENTS_BESIDE_SPARES) * segment_bytes
    return msgspec.structs.replace(
        plan,
        messages=passes * prepared,
        prepared=prepared,
        broker=WARM_SETTINGS
        | {
            "spare_segments": spares,
            "wal_bytes_max": standing_bytes + min(plan.log_bytes, BEHIND_BYTES_MAX),
        },
    )


def room_bytes(plan: Plan) -> int:
    """What the data directory and the file of the bare writes take at most."""
    return int(plan.broker["wal_bytes_max"]) + min(bare.FILE_BYTES, 2 * plan.log_bytes)


def _require_room(rig: Rig, plan: Plan) -> None:
    free, needed = shutil.disk_usage(rig.folder).free, room_bytes(plan)
    if free < needed:
        raise ResourceExhausted(
            f"sustained takes up to {needed / 1e9:.1f} GB in {rig.folder.parent} and {free / 1e9:.1f} GB "
            "are free there; make room, set TMPDIR to a folder on a larger disk, or take a smaller "
            "--log-bytes"
        )


def run_sustained(rig: Rig, plan: Plan) -> Figures:
    """Throughput with fsync over `log_bytes`, then bare writes. Raises FailedPrecondition if a broker was
    given, ResourceExhausted if the disk has not enough room, Internal if no sync was counted."""
    rig.leave_broker("sustained")
    plan = long_plan(plan)
    _require_room(rig, plan)
    rig.broker(plan).rest(REST_SECONDS)
    figures = rates.run_batches(rig, plan)
    rig.drop_broker()  # its segments make room, and nobody else writes from here on
    if not figures.syncs or not figures.bytes_per_sync:
        raise Internal("the broker counted no sync for messages of durability fsync; run it again")
    log_bytes = figures.syncs * figures.bytes_per_sync
    log_bytes_per_s = log_bytes / plan.messages * (figures.messages_per_s or 0.0)
    bare_bytes_per_s = _write_bare(rig, int(figures.bytes_per_sync), int(log_bytes))
    figures.extra |= {
        "log_bytes": log_bytes,
        "log_mb_per_s": log_bytes_per_s / 1e6,
        "bare_mb_per_s": bare_bytes_per_s / 1e6,
        "vs_bare_writes": log_bytes_per_s / bare_bytes_per_s,
    }
    return figures


def _write_bare(rig: Rig, group_bytes: int, total_bytes: int) -> float:
    """Bytes a second of bare writes; groups begin where those of a log may."""
    options = {
        "path": str(rig.folder / "bare"),
        "group_bytes": -(-group_bytes // GROUP_ALIGNMENT) * GROUP_ALIGNMENT,
        "total_bytes": total_bytes,
    }
    with rig.crew() as crew:
        writer = crew.start("bare-writer", "danube_fast.bench.workloads.bare:write_groups", options)
        writer.hear()
        writer.tell("go")
        report = writer.hear(HEAR_SECONDS + total_bytes / SLOWEST_BYTES_PER_S)
        writer.tell("bye")
    return float(report["bytes_per_s"])
