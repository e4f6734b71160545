"""A power cut right behind the ack of a small group: what one call made durable counts only behind a durable log."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from danube_fast.wal.durable_writes import Way
from tests.faults.power import Recording
from tests.faults.rig import SEGMENTS, Disk, FaultyServer, Word, read_all

STRICT, LOOSE = "/default/strict", "/default/loose"
SETTINGS: dict[str, Any] = {"workers": 1, "index_map_bytes": 1 << 20, "retention_seconds_min": 3600}
ROUNDS = 40
CUTS = 4
_T = TypeVar("_T")


class NoLuck(random.Random):
    """Nothing that no sync has covered reaches the disk."""

    def choice(self, seq: Sequence[_T]) -> _T:
        """The worst of them."""
        return seq[0]

    def randint(self, a: int, b: int) -> int:
        """None of them."""
        return a


@pytest.mark.parametrize("way", [Way.DSYNC, Way.DIRECT])
def test_a_power_cut_behind_an_ack(tmp_path: Path, disk: Disk, way: Way) -> None:
    disk.journal = tmp_path / "journal"
    disk.choose(SEGMENTS)
    acks: list[int] = []
    settings = {**SETTINGS, "durable_writes": str(way)}
    with FaultyServer(tmp_path / "data", disk, **settings) as server:
        with server.client(transport="shm") as client:
            client.admin.create_topic(STRICT, durability="fsync")
            client.admin.create_topic(LOOSE, durability="os")
            strict = client.producer(STRICT, durability="fsync")
            loose = client.producer(LOOSE, durability="os")
            for number in range(ROUNDS):
                if number % 2:
                    loose.publish(b"loose %d" % number)
                offset = strict.publish(b"%d" % number).offset
                assert offset == number
                acks.append(disk.journal.stat().st_size)
        assert disk[Word.WRITES_DURABLE] > ROUNDS // 4, "the sync thread was given no groups"
        server.kill("all")
    recording = Recording(disk.journal)
    disk.journal = None
    root = Path(os.path.realpath(tmp_path / "data"))
    for number in range(ROUNDS // 2, ROUNDS, ROUNDS // 2 // CUTS):
        target = tmp_path / f"cut-{number}"
        recording.build(acks[number], root, target, NoLuck(), power=True)
        disk.boot_id = tmp_path / f"boot-{number}"
        disk.boot_id.write_text(f"boot-{number}\n")
        with FaultyServer(target, disk, **settings) as server:
            with server.client() as client:
                found = [message.payload for message in read_all(client, STRICT)]
            server.kill("all")
        want = [b"%d" % at for at in range(number + 1)]
        assert found == want, f"cut {number}: {len(found)} of {number + 1} acked messages are there"
