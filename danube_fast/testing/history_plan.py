"""The choices of a seed for history: which topics stay, how the store fails, how little is done at once."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.config import Settings
from danube_fast.history import manifest, reader
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.testing.faulty_store import StoreFaults
from danube_fast.workers.shard.history import backlogs, uploads
from danube_fast.workers.shard.history import fetches as reads
from danube_fast.workers.uploader import fetches, rounds, uploader

__all__ = ["HistoryBounds", "HistoryPlan"]

KIB = 1024
FAULTS = ("kill_uploader", "kill_uploader", "stall_uploader", "slow_store", "lose_store")
FAULTS_MAX = 5
LONG_SECONDS = 30 * 24 * 3600
"""Nothing expires while a simulation runs, also if an operator sets the clock."""
CHAOS_MORE_NS = 2500 * MILLISECOND_NS
"""A run with history is longer, so that what was trimmed is read while things fail."""

_Place = tuple[ModuleType, str]


class HistoryBounds:
    """Constants of the modules of history: how much is done at once, and how soon again."""

    def __init__(self, values: Mapping[_Place, int]) -> None:
        self._values = dict(values)

    @classmethod
    def drawn(cls, draw: random.Random) -> HistoryBounds:
        """Draw bounds that are small and soon enough to be met in a short run."""
        return cls(
            {
                (rounds, "READ_BYTES"): draw.choice((1, 4 * KIB, 32 * KIB, 4 * KIB * KIB)),
                (rounds, "COMMITS_MAX"): draw.choice((1, 16)),
                (rounds, "ASIDE_NS"): 2 * SECOND_NS,
                (uploader, "LOOK_NS"): draw.choice((20, 100, 400)) * MILLISECOND_NS,
                (uploader, "RETRY_NS"): draw.choice((20, 300)) * MILLISECOND_NS,
                (uploader, "RETRY_NS_MAX"): SECOND_NS,
                (fetches, "FETCH_BYTES"): draw.choice((1, 16 * KIB, 4 * KIB * KIB)),
                (uploads, "RUNS_BYTES"): draw.choice((1, 8 * KIB, KIB * KIB)),
                (uploads, "RUNS_MAX"): draw.choice((1, 4096)),
                (backlogs, "COUNT_BYTES"): draw.choice((1, 8 * KIB, 256 * KIB)),
                (reads, "CHUNKS_MAX"): draw.choice((1, 2, 64)),
                (reads, "RETRY_NS"): draw.choice((20, 300)) * MILLISECOND_NS,
                (manifest, "SNAPSHOT_EVERY"): draw.choice((2, 5, 64)),
                (reader, "BLOCK_TABLES_KEPT"): draw.choice((1, 64)),
            }
        )

    def present(self) -> HistoryBounds:
        """The same constants as they are now."""
        return HistoryBounds({place: getattr(*place) for place in self._values})

    def set(self) -> None:
        """Put them in force for every process of this host."""
        for (module, name), value in self._values.items():
            setattr(module, name, value)


class HistoryPlan:
    """One run with an uploader and a store. Drawn beside all else of its seed."""

    def __init__(self, seed: int) -> None:
        draw = self._draw = random.Random(f"history {seed}")
        self.bounds = HistoryBounds.drawn(draw)
        self.store_faults = StoreFaults(
            busy=draw.choice((0.0, 0.02, 0.1)),
            lost=draw.choice((0.0, 0.05, 0.15)),
            again=draw.choice((0.0, 0.05)),
            late=draw.choice((0.0, 0.1, 0.2)),
            list_late_ns=draw.choice((0, 300 * MILLISECOND_NS, 30 * SECOND_NS)),
        )
        self.sizes = draw.choice(((0, 300, 2000, 3000), (0, 0, 2000, 2000)))
        """Bytes of messages: enough for several segments."""
        self.bundle_bytes = 5000
        """A bundle of so many bytes takes no more frames: the limit is low where segments are small."""
        self.permits_bytes = draw.choice((20_000, 1 << 20, 1 << 24))
        """Byte credit of each consumer."""
        self._object_bytes = draw.choice((16, 64, 256)) * KIB
        self._part_bytes = draw.choice((8, 64)) * KIB
        self._cache_bytes = draw.choice((1, 64 * KIB, KIB * KIB * KIB))
        self._backlog_bytes_max = draw.choice((0, 0, 200 * KIB))
        self._throttle = draw.choice((0, 0, 400 * KIB))
        self.late_ns = draw.randrange(500 * MILLISECOND_NS, 4 * SECOND_NS)
        """When the last subscriptions and readers begin, at the beginning of their topics."""
        self.late_kind = draw.choice(("exclusive", "shared", "failover", "key_shared"))

    def settings(self, settings: Settings) -> Settings:
        """Change the settings of a broker: small segments and objects, uploaded soon, and hardly a tail in memory."""
        return msgspec.structs.replace(
            settings,
            store=MemoryStore.url,
            segment_bytes=64 * KIB,
            segment_start_bytes=64 * KIB,
            history_object_bytes=self._object_bytes,
            history_part_bytes=self._part_bytes,
            history_cache_bytes=self._cache_bytes,
            history_backlog_bytes_max=self._backlog_bytes_max,
            history_throttle_bytes_per_s=self._throttle,
            history_flush_seconds=1,
            tail_bytes_max=self._draw.choice((0, 4 * KIB, 32 * KIB)),
        )

    def policy(self, number: int) -> dict[str, Any]:
        """The policy of the topic of that number. The first one stays, others may."""
        kept = self._draw.choice(("forever", "forever", "until_expired", "until_acked"))
        kept = "forever" if number == 0 and kept == "until_acked" else kept
        if kept == "until_expired":
            return {"retention_policy": kept, "retention_seconds": LONG_SECONDS}
        return {"retention_policy": kept}

    def faults(self, chaos_ns: int) -> list[tuple[int, str]]:
        """Faults of uploader and store, with their times."""
        draw = self._draw
        count = draw.randrange(FAULTS_MAX)
        return [(draw.randrange(chaos_ns), draw.choice(FAULTS)) for _ in range(count)]
