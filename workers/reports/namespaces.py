"""Use of namespaces with a quota: workers report it, the coordinator adds up and says how much more may be accepted.

    worker --NamespaceUsed {namespace: kept, accepted, handles}: what changed --> coordinator
           <--NamespaceFull {namespace: why}; asks those that have said nothing ----
           <== word: bytes that all workers may accept, since the broker's start === (shared memory)

What a worker keeps, less what it accepted by then, only shrinks until its next report. So the limit, less the sum of
these, bounds what all workers may have accepted, whenever each of them spoke: the kernels that admit frames look at it
for each. While the coordinator is down the word stands.

A worker looks four times a second. Only namespaces whose use has changed are in a report, twice with the same values,
so that what is said of the others counts as said again. A coordinator that was started anew gets a whole report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from danube_fast.admin.view import NamespaceRow
from danube_fast.broker import messages as m
from danube_fast.broker.topics.quota import NO_QUOTA
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import DanubeError
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

_log = logging.getLogger(__name__)

REPORT_NS = 250 * MILLISECOND_NS
WAIT_NS = 5 * SECOND_NS
"""So long publishers wait at most until all workers have counted what they keep of a namespace."""
COST_PART, COST_PART_CHANGED = 50, 10
"""Reports take at most this part of a worker's time, the second one when much changes: with many partitions they come
less often."""


class _Said(NamedTuple):
    """The last report on one namespace."""

    use: m.NamespaceUse
    is_repeated: bool
    """Whether the report before had the same values."""


class NamespaceReports(PeriodicJob):
    """Report what namespaces take of one worker. The worker's side."""

    interval_ns = REPORT_NS

    def __init__(self, state: ShardState, namespaces: Namespaces, retention: Retention) -> None:
        self._state, self._namespaces, self._retention = state, namespaces, retention
        self._earliest_ns = 0
        self._said: dict[str, _Said] = {}
        self._is_whole_due = True
        """The coordinator knows nothing of this worker."""
        mailbox = state.boot.mailbox
        mailbox.epoch_watchers.append(self._restarted)
        mailbox.serve(m.NamespaceFull, self._full)

    def _restarted(self, peer: int, epoch: int) -> None:
        if peer == COORDINATOR:
            self._is_whole_due, self._next_ns = True, 0

    @property
    def is_busy(self) -> bool:
        """Whether there is something to count without delay."""
        return self._namespaces.is_watched

    def do_work(self, now_ns: int) -> None:
        """Report if it is time, or if partitions or quotas have changed."""
        if now_ns < self._next_ns and self._namespaces.changed and now_ns >= self._earliest_ns:
            self._report(list(self._namespaces.changed.values()), now_ns)
        super().do_work(now_ns)

    def run(self, now_ns: int) -> None:
        """Report the namespaces that have a quota."""
        known = self._namespaces.with_quota()
        if known:
            took_ns = self._report(known, now_ns)
            self._next_ns = max(self._next_ns, now_ns + COST_PART * took_ns)

    def _report(self, looked_at: list[Namespace], now_ns: int) -> int:
        """Report those of these namespaces whose use has changed; how long it took."""
        began_ns = self._state.clock.monotonic_ns()
        self._namespaces.changed.clear()
        self._namespaces.count_handles()
        self._tell(looked_at)
        took_ns = self._state.clock.monotonic_ns() - began_ns
        self._earliest_ns = now_ns + COST_PART_CHANGED * took_ns
        return took_ns

    def _tell(self, looked_at: list[Namespace]) -> None:
        is_whole, said = self._is_whole_due, {}
        if is_whole:
            self._said.clear()
            looked_at = self._namespaces.with_quota()
        for namespace in looked_at:
            name, use = namespace.name, self._use(namespace)
            last = self._said.get(name)
            is_repeated = last is not None and last.use == use
            if last is None or not (is_repeated and last.is_repeated):
                said[name] = _Said(use, is_repeated)
            elif not namespace.partitions:
                self._namespaces.drop(namespace)
                del self._said[name]
        if said or is_whole:
            used = {name: each.use for name, each in said.items()}
            self._state.boot.mailbox.notify(COORDINATOR, m.NamespaceUsed(used, is_whole))
        self._said |= said
        self._is_whole_due = False

    def _use(self, namespace: Namespace) -> m.NamespaceUse:
        worker = self._state.boot.config.process_index
        size, is_measured = 0, bool(namespace.quota.namespace_storage_bytes_max)
        if is_measured:
            for partition in namespace.partitions.values():
                if partition.reliable:
                    kept, is_known = self._retention.measure(partition)
                    size += kept
                    is_measured = is_measured and is_known
        shared = namespace.shared
        return m.NamespaceUse(size, shared.accepted(worker), shared.handles(worker), is_measured)

    def _full(self, request: Request[m.NamespaceFull]) -> None:
        full = request.message.full
        if full:
            self._namespaces.set_full(full)
        else:  # the question of a coordinator that counts on all workers
            self._is_whole_due = True
            self._tell([])


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

    def __init__(
        self, boot: Boot, topics: TopicDirectory, hosts: Callable[[str], set[int]]
    ) -> None:
        """`hosts`: finds the workers with partitions of a namespace."""
        self._boot, self._topics, self._hosts = boot, topics, hosts
        self._workers = list(boot.config.processes.workers)
        self._reports: dict[int, dict[str, _Report]] = {}
        """By worker and namespace."""
        self._epochs: dict[int, int] = {}
        """By worker: its epoch when it made a whole report last."""
        self._words: dict[str, NamespaceWords] = {}
        self._known = set(topics.namespaces.with_quota())
        """Namespaces whose words count; those of others may be left from one of the same name."""
        self._waiting_since_ns: dict[str, int] = {}
        """Namespaces whose publishers wait until it is known what is kept, the longest first."""
        self._full: dict[str, str] = {}
        """Why namespaces take no publishes."""
        self._next_ns = 0
        topics.namespaces.quota_listeners.append(self._changed)
        boot.mailbox.serve(m.NamespaceUsed, self._report)

    def do_work(self, now_ns: int) -> None:
        """Ask workers that have said nothing, and wait no longer for those that do not answer."""
        if not self._known or now_ns < self._next_ns:
            return
        self._next_ns = now_ns + REPORT_NS
        self._ask()
        self._judge([
            name for name, since_ns in self._waiting_since_ns.items() if now_ns - since_ns >= WAIT_NS
        ])  # fmt: skip

    def of(self, namespace: str) -> Usage:
        """Return what a namespace takes; zeros of what its quota does not bound."""
        bounds_handles = self._topics.namespaces.quota(namespace).namespace_handles_max
        handles = self._words_of(namespace).handles_of_all() if bounds_handles else 0
        return Usage(sum(each.use.storage_bytes for each in self._reports_of(namespace)), handles)

    def _reports_of(self, namespace: str) -> list[_Report]:
        found = [said.get(namespace) for said in list(self._reports.values())]
        return [report for report in found if report is not None]

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
        peer, used = request.peer, request.message.used
        namespaces, names = self._topics.namespaces, set(used)
        before = self._reports.get(peer, {})
        after = before
        if request.message.is_whole:
            after, epoch = {}, self._boot.control.epoch(peer)
            if self._epochs.get(peer) != epoch:
                self._epochs[peer] = epoch
                names |= self._known  # all may be known by now
            names |= before.keys()
        for name, use in used.items():
            if namespaces.quota(name) != NO_QUOTA:
                after[name] = _report_of(use, before.get(name))
        self._reports[peer] = after
        self._judge(names, peer)
        if used:
            self._tell(peer, {name: self._full.get(name, "") for name in used})
        if self._known:
            self._ask()

    def _changed(self, name: str) -> None:
        """Take over the quota that was set for a namespace, which may be gone."""
        if self._topics.namespaces.quota(name) == NO_QUOTA:
            for said in self._reports.values():
                said.pop(name, None)
            if name in self._known:
                self._judge([name])
                self._known.discard(name)
                self._words.pop(name, None)
            return
        if name not in self._known:
            self._known.add(name)
            self._words_of(name).clear()
        if self._words_of(name).until:  # otherwise it is known with reports
            self._judge([name])

    def _ask(self) -> None:
        for worker in self._unheard():
            if self._is_ready(worker):
                self._tell(worker, {})

    def _is_ready(self, worker: int) -> bool:
        return self._boot.control.state(worker) == ProcessState.READY

    def _tell(self, worker: int, full: dict[str, str]) -> None:
        """Tell a worker which namespaces are full. One that cannot be told is asked later, and its answer is answered."""
        try:
            self._boot.mailbox.notify(worker, m.NamespaceFull(full))
        except DanubeError as error:
            if self._epochs.pop(worker, None) is not None:  # logged once
                _log.warning("process %d is not told of full namespaces: %s", worker, error)

    def _unheard(self) -> list[int]:
        """List the workers that have said nothing since they were started."""
        epochs, control = self._epochs, self._boot.control
        return [worker for worker in self._workers if epochs.get(worker) != control.epoch(worker)]

    def _judge(self, names: Iterable[str], asker: int = -1) -> None:
        """Bound namespaces anew, and tell workers which are full and which are no more; `asker` will be answered."""
        changed: dict[str, str] = {}
        for name in names:
            text = self._bound(name)
            if text != self._full.get(name, ""):
                changed[name] = text
        self._full |= changed
        for name, text in changed.items():
            if not text:
                del self._full[name]
        for worker in self._workers if changed else ():
            if worker != asker and self._is_ready(worker):
                self._tell(worker, changed)

    def _bound(self, name: str) -> str:
        """Say how much may be accepted for a namespace; why nothing, if it is full."""
        limit = self._topics.namespaces.quota(name).namespace_storage_bytes_max
        if not limit:
            self._waiting_since_ns.pop(name, None)
            if name in self._known:
                self._words_of(name).set_until(0)
            return ""
        words, reports = self._words_of(name), self._reports_of(name)
        before, silent = words.until, [w for w, said in self._reports.items() if name not in said]
        is_whole = not self._unheard() and all(report.use.is_measured for report in reports)
        if not before and is_whole:
            is_whole = self._hosts(name).isdisjoint(silent)
        if not before and not is_whole and not self._has_waited(name):
            return ""  # publishers wait until it is known what is there
        self._waiting_since_ns.pop(name, None)
        # what a worker accepted that has nothing of it any more counts as kept no longer
        surplus = sum(report.surplus for report in reports)
        surplus -= sum(words.accepted(worker) for worker in silent)
        until = max(1, limit - surplus)
        if before and not is_whole:
            until = min(until, before)
        words.set_until(until)
        used = sum(report.use.storage_bytes for report in reports)
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
