"""Writes without Spark: rows staged as a task does, and drivers in processes of their own that are killed at a step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from danube_fast.children import child_environment
from danube_fast.history.stores.store import ObjectStore
from danube_fast.spark.write.publishing import BrokerLink, Proposal, publish_proposal
from danube_fast.spark.write.record import StagedObject, staged_prefix
from danube_fast.spark.write.rows import stage_rows
from danube_fast.spark.write.staging import Stager, open_staging

DRIVER_SECONDS = 60


def numbers(start: int, count: int) -> list[bytes]:
    """Payloads that tell rows apart."""
    return [b"%d" % number for number in range(start, start + count)]


def stage(
    link: BrokerLink, store: ObjectStore, topic: str, write_id: str, rows: pa.Table, *,
    batch: int = 0, run: str = "r", task: int = 0,
) -> tuple[tuple[int, ...], list[StagedObject]]:  # fmt: skip
    """Stage rows as one task does: the partitions, and the objects."""
    target = link.target(topic, store.url)
    stager = Stager(store, target, f"{staged_prefix(write_id, batch, run)}{task:06d}-")
    stage_rows(rows.to_batches(max_chunksize=100), stager, len(target.partition_ids), task)
    return target.partition_ids, stager.finish()


def propose(
    link: BrokerLink, store: ObjectStore, topic: str, write_id: str, payloads: Sequence[bytes], *,
    batch: int = 0, run: str = "r", query: str = "",
) -> Proposal:  # fmt: skip
    """Stage payloads in two tasks, and propose them."""
    objects: list[StagedObject] = []
    half = len(payloads) // 2
    ids: tuple[int, ...] = ()
    for task, some in enumerate((payloads[:half], payloads[half:])):
        rows = pa.table({"payload": pa.array(list(some), pa.binary())})
        ids, staged = stage(link, store, topic, write_id, rows, batch=batch, run=run, task=task)
        objects += staged
    return Proposal(write_id, batch, query, topic, ids, objects)


def write(
    url: str, store_url: str, topic: str, write_id: str, payloads: Sequence[bytes], **more: Any
) -> int:
    """What a driver does in all: how many rows were published under the write id."""
    store = open_staging(store_url)
    with BrokerLink(url, 30) as link:
        return publish_proposal(
            link, store, propose(link, store, topic, write_id, payloads, **more)
        )


def payloads_of(client: Any, topic: str) -> list[bytes]:
    """All messages of a topic."""
    with client.reader(topic, start="earliest", stop="latest") as reader:
        return [bytes(message.payload) for message in reader]


def assert_once(client: Any, topic: str, expected: Sequence[bytes]) -> None:
    """Each of the rows is there, and none twice."""
    found = Counter(payloads_of(client, topic))
    assert found == Counter(expected)


def killed_driver(
    url: str, store: Path | str, topic: str, write_id: str, start: int, count: int, step: str
) -> None:
    """Run a driver in a process that kills itself at a step. `store`: a folder, or a URL."""
    staging = store if isinstance(store, str) else f"file://{store}"
    words = [url, staging, topic, write_id, str(start), str(count), step]
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.write_driver", json.dumps(words)],
        env=child_environment(), capture_output=True, text=True, timeout=DRIVER_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == -9, f"the driver was to be killed at {step}: {done.stderr}"
