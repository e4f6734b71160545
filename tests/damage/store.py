"""A data directory that a real broker filled, what is in it, and ways to harm it."""

from __future__ import annotations

import collections
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from danube_fast.broker import records as r
from danube_fast.broker.admission.tables import AdmissionTables
from danube_fast.clock import SystemClock
from danube_fast.config import Settings
from danube_fast.frame.layout import HEADER_BYTES, HEADER_DTYPE, Flag
from danube_fast.metadata.lmdb_store import LmdbStore
from danube_fast.wal.layout import GROUP_ALIGNMENT, SEGMENT_HEADER_BYTES
from danube_fast.wal.log import Log
from danube_fast.wal.segment import Chain, list_segments
from danube_fast.wal.walk import Walk, read_at
from danube_fast.workers.process.layout import METADATA_SEAL
from danube_fast.workers.shard.catalog import Catalog
from danube_fast.workers.supervisor.datadir import DataDirectory
from tests.crash.rig import SMALL, Server
from tests.workers.broker import wait_until

__all__ = ["SEED", "TOPICS", "Harm", "cases", "content", "fill", "read_all"]

SEED = int(os.environ.get("DANUBE_DAMAGE_SEED", "1"))
WORKERS = 2
PER_TOPIC = 1600
TOPICS: dict[str, dict[str, Any]] = {
    "/default/safe": {"dispatch": "reliable", "durability": "fsync"},
    "/default/quick": {"dispatch": "reliable", "durability": "os"},
    "/default/many": {"dispatch": "reliable", "durability": "fsync", "partitions": 3},
}
PAGE = 4096


def cases(default: int) -> list[int]:
    """Which cases are tried: DANUBE_DAMAGE_CASES makes it more, DANUBE_DAMAGE_CASE picks one."""
    if "DANUBE_DAMAGE_CASE" in os.environ:
        return [int(os.environ["DANUBE_DAMAGE_CASE"])]
    return list(range(int(os.environ.get("DANUBE_DAMAGE_CASES", "0")) or default))


def fill(data_dir: Path, *, end: str) -> None:
    """Topics, several segments in each log, snapshots, cursors; then "stop" or "kill"."""
    draw = random.Random(SEED)
    server = Server(data_dir, workers=WORKERS)
    with server:
        with server.client() as client:
            for topic, options in TOPICS.items():
                with client.producer(topic, name="p", **options) as producer:
                    for number in range(PER_TOPIC):
                        producer.send(b"%d " % number + draw.randbytes(900), key=f"k{number % 9}")
                    producer.flush(timeout=60)
                with client.consumer(
                    topic, subscription="s", initial_position="earliest"
                ) as taking:
                    taken = [taking.receive(timeout=60) for _ in range(400)]
                    taking.ack([message for message in taken if message and message.offset % 5])
                    taking.flush_acks()
        wait_until("snapshots", lambda: len(list(data_dir.glob("logs/*/*.snap"))) >= WORKERS)
        at_rest(data_dir)
        if end == "stop":
            server.stop()
        else:
            server.kill("all")
    for log in (data_dir / "logs").iterdir():
        assert len(list(log.glob("0*.seg"))) >= 2, "too few segments"


def at_rest(data_dir: Path) -> None:
    """Until each log ends with a marker that says that all before it is durable, and stays so a second."""
    logs = sorted((data_dir / "logs").iterdir())
    stands: list[tuple[list[int | None], float]] = []

    def still() -> bool:
        ends = [_marked_end(log) for log in logs]
        if not stands or stands[-1][0] != ends:
            stands.append((ends, time.monotonic()))
        return None not in ends and time.monotonic() - stands[-1][1] > 1

    wait_until("standing logs", still)


def _marked_end(directory: Path) -> int | None:
    """Where a log ends, if it does so with a marker."""
    chain = Chain(list_segments(directory, SEGMENT_HEADER_BYTES))
    try:
        newest = chain[-1]
        walk = Walk(chain, newest.log_id or 0, newest.first_position, newest.epoch)
        collections.deque(walk.blocks(), maxlen=0)
        if walk.position == newest.first_position:
            return None
        at = walk.position - GROUP_ALIGNMENT
        header = np.frombuffer(read_at(newest, at, HEADER_BYTES), HEADER_DTYPE)[0]
        is_marker = bool(header["flags"] & Flag.PAD) and header["synced_position"] == at
        return walk.position if is_marker else None
    finally:
        chain.close()


def read_all(server: Server) -> dict[str, Any]:
    """What a client is served: every message, and where each subscription stands."""
    found: dict[str, Any] = {}
    with server.client() as client:
        for topic in TOPICS:
            found[topic] = sorted(
                (m.topic, m.offset, m.payload, m.key) for m in client.reader(topic)
            )
            found[f"{topic} s"] = [
                (sub["subscription"], sub["lag_messages"], sub["unacked"])
                for sub in client.admin.list_subscriptions(topic)
            ]
    return found


def content(data_dir: Path) -> dict[str, Any]:
    """The same with no broker: opened and replayed as its processes do it. Raises what they raise."""
    settings = msgspec.structs.replace(Settings(), **SMALL)
    clock = SystemClock()
    directory = DataDirectory.open(str(data_dir))
    try:
        store = LmdbStore(directory.metadata, clock, data_dir / METADATA_SEAL)
        try:
            found: dict[str, Any] = {"metadata": store.list("/")}
        finally:
            store.close()
        for log_id, path in directory.logs(WORKERS):
            found[path.removeprefix(str(data_dir))] = _log_content(Path(path), log_id, settings)
    finally:
        directory.close()
    return found


def _log_content(path: Path, log_id: int, settings: Settings) -> Any:
    log = Log.open(path, log_id=log_id, settings=settings, clock=SystemClock(), lock_timeout_ms=0)
    try:
        catalog = Catalog(AdmissionTables())
        if log.snapshot is not None:
            for record in r.decode_snapshot(log.snapshot[1]):
                catalog.apply(record, 0)
        for block in log.replay():
            catalog.apply_block(block, 0)
        state = catalog.snapshot(0, r.EpochStarted(0, 0, "", clean=False))
        messages = {
            partition_id: [
                (run.base_offset, bytes(log.read_run(run)))
                for run in log.runs(partition_id, 0, 1 << 40)
            ]
            for partition_id in catalog.by_id
        }
        joined = {key: b"".join(data for _, data in runs) for key, runs in messages.items()}
        return sorted(map(repr, state)), joined
    finally:
        log.close()


class Harm(NamedTuple):
    """One thing done to one file."""

    how: str
    path: str
    at: int
    bit: int

    @classmethod
    def draw(cls, data_dir: Path, case: int) -> Harm:
        """Of a seed and a case; kinds of files and ways alike, so small files are not spared."""
        draw = random.Random(f"{SEED} {case}")
        files = sorted(path for path in data_dir.rglob("*") if path.is_file())
        kinds: dict[str, list[Path]] = {}
        for path in files:
            name = path.name.lstrip("0123456789") or "log"
            kinds.setdefault(
                f"{path.parent.name if path.suffix == '.mdb' else ''}{name}", []
            ).append(path)
        important = [
            kind for kind in kinds if kind in (".seg", "indexdata.mdb", "metadatadata.mdb")
        ]
        path = draw.choice(kinds[draw.choice([*sorted(kinds), *important, ".seg", ".seg"])])
        how = draw.choice(["flip", "flip", "flip", "cut", "zero", "delete"])
        at = draw.choice(_written(path) or [0]) * PAGE
        at += draw.choice([draw.randrange(PAGE), draw.randrange(128)])
        size = path.stat().st_size
        return cls(
            how, str(path.relative_to(data_dir)), min(at, max(size - 1, 0)), draw.randrange(8)
        )

    def do(self, data_dir: Path) -> None:
        """Harm the copy."""
        path = data_dir / self.path
        if self.how == "delete":
            path.unlink()
            return
        if self.how == "cut":
            os.truncate(path, self.at)
            return
        with path.open("r+b") as file:
            start = self.at - self.at % PAGE if self.how == "zero" else self.at
            file.seek(start)
            old = file.read(PAGE if self.how == "zero" else 1)
            file.seek(start)
            file.write(
                bytes(len(old)) if self.how == "zero" else bytes(b ^ 1 << self.bit for b in old)
            )

    def about(self, case: int, test: str) -> str:
        """What failed and how to see it again."""
        where = "" if self.how == "delete" else f" at {self.at}, bit {self.bit}"
        return (
            f"{self.how} of {self.path}{where}; again: DANUBE_DAMAGE_SEED={SEED} "
            f"DANUBE_DAMAGE_CASE={case} ./run test {test}"
        )


def _written(path: Path) -> list[int]:
    """Pages of a file that hold anything."""
    data = path.read_bytes()
    zeros = bytes(PAGE)
    return [at // PAGE for at in range(0, len(data), PAGE) if data[at : at + PAGE] != zeros]


def copy_of(source: Path, target: Path) -> Path:
    """A fresh copy, over whatever stands there."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target
