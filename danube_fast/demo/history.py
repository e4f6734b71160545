"""The demo's last act: all flights go into an object store, the logs are trimmed, and a reader reads them back.

flush --> objects in a folder; each worker's log gives its oldest segments back --> reader from the earliest
offset, across the seam --> every flight once, counted per carrier
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from danube_fast.clock import SECOND_NS
from danube_fast.demo.check import Catalogue
from danube_fast.demo.records import fingerprint
from danube_fast.demo.stage import TOPIC, WORKERS, Stage

if TYPE_CHECKING:
    from danube_fast.client.client import Client

__all__ = ["History", "history_problems", "read_back"]

BATCH_MESSAGES = 10_000
TRIM_SECONDS = 20.0
"""Logs are looked at once a second."""
TRIMMED_MESSAGES_MIN = 20_000
"""With fewer a log is one segment, which is never given back."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The flights that came back from the store."""

    objects: int
    object_bytes: int
    trimmed_logs: int
    """Logs that have given segments back."""
    trimmed_bytes: int
    read: int
    distinct: int
    """Different flights among them."""
    seconds: float
    """From the first read to the last flight."""
    carriers: dict[str, int]


def read_back(client: Client, stage: Stage, catalogue: Catalogue) -> History:
    """Upload the topic, wait until the logs are trimmed, and read all of it. Raises DanubeError."""
    stage.view.say(f"uploading all flights to {stage.store_url}, and trimming the logs")
    client.admin.flush_history(TOPIC)
    trimmed: list[int] = []
    deadline_ns = stage.clock.monotonic_ns() + int(TRIM_SECONDS * SECOND_NS)
    wanted = WORKERS if catalogue.count >= TRIMMED_MESSAGES_MIN else 0
    while len(trimmed) < wanted and stage.clock.monotonic_ns() < deadline_ns:
        stage.listen()
        logs = client.admin.cluster_status()["logs"]
        trimmed = [each["oldest_position"] for each in logs if each.get("oldest_position")]
    stage.view.say("reading them back")
    began_ns = stage.clock.monotonic_ns()
    rows = []
    with client.reader(TOPIC, start="earliest") as reader:
        for batch in reader.batches(BATCH_MESSAGES):
            rows.append(catalogue.rows_of(fingerprint(batch.payloads())))
    seconds = (stage.clock.monotonic_ns() - began_ns) / SECOND_NS
    found = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    known = np.unique(found[found >= 0])
    names, counts = np.unique(catalogue.keys[known], return_counts=True)
    sizes = [path.stat().st_size for path in _objects(stage.store)]
    return History(
        objects=len(sizes),
        object_bytes=sum(sizes),
        trimmed_logs=len(trimmed),
        trimmed_bytes=sum(trimmed),
        read=len(found),
        distinct=len(known),
        seconds=seconds,
        carriers={n.decode(): int(c) for n, c in zip(names, counts, strict=True)},
    )


def history_problems(catalogue: Catalogue, history: History) -> list[str]:
    """Name each thing that is wrong with it, in a sentence."""
    problems = []
    if history.read != catalogue.count or history.distinct != catalogue.count:
        problems.append(
            f"{history.read} messages came back from history, {history.distinct} different flights of "
            f"{catalogue.count}"
        )
    if history.carriers != catalogue.carriers:
        problems.append("the carriers' flights from history are not those of the data set")
    if history.trimmed_logs < WORKERS and catalogue.count >= TRIMMED_MESSAGES_MIN:
        problems.append(f"only {history.trimmed_logs} of {WORKERS} logs were trimmed")
    return problems


def _objects(store: Path) -> list[Path]:
    return [path for path in (store / "objects").rglob("*") if path.is_file()]
