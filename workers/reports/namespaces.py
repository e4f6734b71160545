"""Use of namespaces with a quota: workers report it, the coordinator adds up and says how much more may be accepted.

    worker --NamespaceUsed {namespace: kept, accepted, handles} 4 times a second--> coordinator
           <--NamespaceFull {namespace: why}; asks those that have said nothing ----
           <== word: bytes that all workers may accept, since the broker's start === (shared memory)

What a worker keeps, less what it accepted by then, only shrinks until its next report. So the limit, less the sum of
these, bounds what all workers may have accepted, whenever each of them spoke: the kernels that admit frames look at it
for each. While the coordinator is down the word stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from danube_fast.admin.view import NamespaceRow
from danube_fast.broker import messages as m
from danube_fast.broker.topics.quota import NamespaceQuota
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.ring.control import ProcessState
from danube_fast.ring.namespace_words import NamespaceWords
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.boot import Boot
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.reports.namespace_metrics import OTHERS, name_first
from danube_fast.workers.reports.storage import StorageReports
from danube_fast.workers.shard.job import PeriodicJob

if TYPE_CHECKING:  # the coordinator, which every start waits for, imports this module and no shard
    from danube_fast.broker.topics.directory import TopicDirectory
    from danube_fast.workers.shard.keep.namespaces import Namespace, Namespaces
    from danube_fast.workers.shard.keep.retention import Retention
    from danube_fast.workers.shard.state import ShardState

__all__ = ["NamespaceReports", "NamespaceUsage", "Usage", "storage_jobs"]

REPORT_NS = 250 * MILLISECOND_NS
WAIT_NS = 5 * SECOND_NS
"""So long publishers wait at most until all workers have counted what they keep of a namespace."""
COST_PART, COST_PART_CHANGED = 50, 10
"""Reports take at most this part of a worker's time, the second one when much changes: with many partitions they come
less often."""


class NamespaceReports(PeriodicJob):
    """Report what namespaces take of one worker. The worker's side."""

    interval_ns = REPORT_NS

    def __init__(self, state: ShardState, namespaces: Namespaces, retention: Retention) -> None:
        self._state, self._namespaces, self._retention = state, namespaces, retention
        self._earliest_ns = 0
        state.boot.mailbox.serve(m.NamespaceFull, self._full)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to count without delay."""
        return self._namespaces.is_watched

    def do_work(self, now_ns: int) -> None:
        """Report if it is time, or if partitions or quotas have changed."""
        if self._namespaces.is_changed and now_ns >= self._earliest_ns:
            self._next_ns = now_ns
        super().do_work(now_ns)

    def run(self, now_ns: int) -> None:
        """Report the namespaces that have a quota."""
        self._namespaces.is_changed = False
        known = self._namespaces.with_quota()
        if not known:
            return
        began_ns = self._state.clock.monotonic_ns()
        self._namespaces.count_handles()
        used = {namespace.name: self._use(namespace) for namespace in known}
        self._state.boot.mailbox.notify(COORDINATOR, m.NamespaceUsed(used))
        took_ns = self._state.clock.monotonic_ns() - began_ns
        self._next_ns = max(self._next_ns, now_ns + COST_PART * took_ns)
        self._earliest_ns = now_ns + COST_PART_CHANGED * took_ns

    def _use(self, namespace: Namespace) -> m.NamespaceUse:
        worker = self._state.boot.config.process_index
        size, is_measured = 0, True
        if namespace.quota.namespace_storage_bytes_max:
            for partition in namespace.partitions.values():
                if partition.reliable:
                    kept, is_known = self._retention.measure(partition)
                    size += kept
                    is_measured = is_measured and is_known
        shared = namespace.shared
        return m.NamespaceUse(size, shared.accepted(worker), shared.handles(worker), is_measured)

    def _full(self, request: Request[m.NamespaceFull]) -> None:
        self._namespaces.set_full(request.message.full)
        if (
            not self._namespaces.with_quota()
        ):  # the question of a coordinator that counts on all workers
            self._state.boot.mailbox.notify(COORDINATOR, m.NamespaceUsed({}))


def storage_jobs(
    state: ShardState, retention: Retention, namespaces: Namespaces
) -> list[PeriodicJob]:
    """Make the jobs of a worker that report what topics, and namespaces, take of it."""
    return [StorageReports(state, retention), NamespaceReports(state, namespaces, retention)]


class Usage(NamedTuple):
    """Bytes and handles of one namespace on all workers."""

    storage_bytes: int
    handles: int


class _Report(NamedTuple):
    """The last report of a worker on one namespace, and how much it kept beyond what it accepted."""

    use: m.NamespaceUse
    surplus: int
    """The larger one of its last two reports: a partition that moves may be missing in one."""


class NamespaceUsage:
    """Add up what workers report, and bound what they accept. The coordinator's side."""

    def __init__(self, boot: Boot, topics: TopicDirectory) -> None:
        self._boot, self._topics = boot, topics
        self._workers = list(boot.config.processes.workers)
        self._reports: dict[int, dict[str, _Report]] = {}
        """By worker and namespace."""
        self._epochs: dict[int, int] = {}
        """By worker: its epoch when it spoke last."""
        self._words: dict[str, NamespaceWords] = {}
        self._bounded: set[str] = set()
        self._waiting_since_ns: dict[str, int] = {}
        boot.mailbox.serve(m.NamespaceUsed, self._report)

    def of(self, namespace: str) -> Usage:
        """Return what a namespace takes; zeros of what its quota does not bound."""
        reports = list(self._reports.values())
        uses = [said[namespace].use for said in reports if namespace in said]
        bounds_handles = self._topics.namespaces.quota(namespace).namespace_handles_max
        handles = self._words_of(namespace).handles_of_all() if bounds_handles else 0
        return Usage(sum(use.storage_bytes for use in uses), handles)

    def table(self, published: Mapping[str, list[int]], most: int) -> dict[str, NamespaceRow]:
        """Make the rows of `/metrics`, at most so many and one for the others; any thread may call this."""
        namespaces = self._topics.namespaces
        rows: dict[str, NamespaceRow] = {}
        for name in [*namespaces.with_quota(), *published]:
            row = name_first(rows, name, most)
            if row:
                messages, byte_count = published.get(name, (0, 0))
                quota, usage = namespaces.quota(name), self.of(name)
                rows[row] = NamespaceRow(
                    messages, byte_count, namespaces.topic_count(name), usage.storage_bytes,
                    usage.handles, {k: v for k, v in msgspec.structs.asdict(quota).items() if v},
                )  # fmt: skip
        others = [values for name, values in published.items() if name not in rows]
        if others:
            messages, byte_count = (sum(column) for column in zip(*others, strict=True))
            rows[OTHERS] = NamespaceRow(messages, byte_count)
        return rows

    def _report(self, request: Request[m.NamespaceUsed]) -> None:
        control = self._boot.control
        self._epochs[request.peer] = control.epoch(request.peer)
        before = self._reports.get(request.peer, {})
        self._reports[request.peer] = {
            name: _report_of(use, before.get(name)) for name, use in request.message.used.items()
        }
        full: dict[str, str] = {}
        namespaces = self._topics.namespaces
        bounded = {
            name for name in namespaces.with_quota()
            if namespaces.quota(name).namespace_storage_bytes_max
        }  # fmt: skip
        for name in self._bounded - bounded:
            self._words_of(name).set_until(0)
            self._waiting_since_ns.pop(name, None)
        self._bounded = bounded
        for name in bounded:
            text = self._bound(name, namespaces.quota(name))
            if text and name in request.message.used:
                full[name] = text
        if request.message.used:
            self._boot.mailbox.notify(request.peer, m.NamespaceFull(full))
        for worker in self._unheard() if bounded else ():
            if control.state(worker) == ProcessState.READY:
                self._boot.mailbox.notify(worker, m.NamespaceFull({}))

    def _unheard(self) -> list[int]:
        """List the workers that have said nothing since they were started."""
        epochs, control = self._epochs, self._boot.control
        return [worker for worker in self._workers if epochs.get(worker) != control.epoch(worker)]

    def _bound(self, name: str, quota: NamespaceQuota) -> str:
        """Say how much may be accepted for a namespace; why nothing, if it is full."""
        limit = quota.namespace_storage_bytes_max
        reports = [said[name] for said in self._reports.values() if name in said]
        words = self._words_of(name)
        before = words.until
        is_whole = not self._unheard() and all(report.use.is_measured for report in reports)
        if not before and not is_whole and not self._has_waited(name):
            return ""  # publishers wait until it is known what is there
        silent = [worker for worker, said in self._reports.items() if name not in said]
        # what a worker accepted that has nothing of it any more counts as kept no longer
        surplus = sum(report.surplus for report in reports)
        surplus -= sum(words.accepted(worker) for worker in silent)
        until = max(1, limit - surplus)
        if before and not is_whole:
            until = min(until, before)
        words.set_until(until)
        used = self.of(name).storage_bytes
        if used < limit:
            return ""
        return (
            f"namespace {name} keeps {used} bytes and its quota is namespace_storage_bytes_max {limit}; delete or purge "
            f"a topic, let messages expire, or have the quota raised: danube-fast namespaces set-quota {name} "
            "namespace_storage_bytes_max=N"
        )

    def _has_waited(self, name: str) -> bool:
        """Whether publishers have waited for long enough: a worker may be down for good."""
        now_ns = self._boot.clock.monotonic_ns()
        return now_ns - self._waiting_since_ns.setdefault(name, now_ns) >= WAIT_NS

    def _words_of(self, name: str) -> NamespaceWords:
        words = self._words.get(name)
        if words is None:
            boot = self._boot
            words = NamespaceWords(boot.buckets, boot.control, self._workers, name)
            self._words[name] = words
        return words


def _report_of(use: m.NamespaceUse, before: _Report | None) -> _Report:
    surplus = use.storage_bytes - use.accepted_bytes
    if before is None:
        return _Report(use, surplus)
    if not use.is_measured:  # part of it is missing
        return _Report(use, max(surplus, before.surplus))
    last = before.use.storage_bytes - before.use.accepted_bytes
    return _Report(use, max(surplus, last))
