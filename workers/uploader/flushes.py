"""Flushes that were asked for: upload all of some partitions up to now, and hold the objects for a reader outside.

Partitions without history are copied for as long as the hold lasts (`copies.py`).

The reader renews its hold while it reads, and releases it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import DanubeError, DeadlineExceeded, FailedPrecondition, Unavailable
from danube_fast.history.holds import Hold, make_hold, release_hold, renew_hold
from danube_fast.history.manifest import Manifest
from danube_fast.history.stores.store import ObjectStore
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.process.tasks import Ask, Do, Pause, Task
from danube_fast.workers.uploader.copies import Copies
from danube_fast.workers.uploader.rounds import Rounds
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["Flushes"]

LOOK_NS = 20 * MILLISECOND_NS


class Flushes:
    """Answer flushes, and what is asked about their holds."""

    def __init__(self, state: UploaderState, rounds: Rounds) -> None:
        self._state, self._rounds = state, rounds
        self._copies = Copies(state, rounds)
        mailbox, start = state.boot.mailbox, self._start
        mailbox.serve(m.FlushHistory, lambda asked: start(asked, self._flushed(asked.message)))
        mailbox.serve(m.RenewHold, lambda asked: start(asked, self._renewed(asked.message)))
        mailbox.serve(m.ReleaseHold, lambda asked: start(asked, self._released(asked.message)))

    def _start(self, request: Request[Any], task: Task) -> None:
        self._state.tasks.start(self._answer(request, task))

    def _answer(self, request: Request[Any], task: Task) -> Task:
        try:
            request.reply((yield from task))
        except DanubeError as error:
            request.fail(error)

    def _renewed(self, asked: m.RenewHold) -> Task:
        store, clock = self._state.store, self._state.clock
        renew = partial(renew_hold, store, asked.hold, asked.hold_seconds, clock, asked.topic)
        hold: Hold = yield Do(renew)
        return m.RenewedHold(hold.key, _expires(hold))

    def _released(self, asked: m.ReleaseHold) -> Task:
        yield Do(partial(release_hold, self._state.store, asked.hold, asked.topic))

    def _flushed(self, asked: m.FlushHistory) -> Task:
        state = self._state
        deadline_ns = state.clock.monotonic_ns() + asked.timeout_ms * MILLISECOND_NS
        while state.is_starting and state.clock.monotonic_ns() < deadline_ns:
            yield Pause(LOOK_NS)
        store = state.store  # before anything is asked: who asks is told why it is not there
        found = yield from self._backlogs(asked.partition_ids)
        missing = [number for number in asked.partition_ids if number not in found]
        if not missing:
            backlogs = [found[number] for number in asked.partition_ids]
            return (
                yield from self._held(
                    asked, store, backlogs, self._uploaded(backlogs, asked, deadline_ns)
                )
            )
        log_only = yield from self._log_only(asked, missing)
        yield from self._copies.begin(missing, deadline_ns)
        keys: set[str] = set()
        try:
            copied = self._copied(log_only, deadline_ns, keys)
            return (
                yield from self._held(asked, store, [backlog for _, backlog in log_only], copied)
            )
        finally:
            self._copies.end(missing, keys)

    def _held(
        self,
        asked: m.FlushHistory,
        store: ObjectStore,
        backlogs: Sequence[m.Backlog],
        manifests: Task,
    ) -> Task:
        """Hold what the manifests name that a task gives, and tell how far they are."""
        state = self._state
        found: list[Manifest] = yield from manifests
        keys = {section.key for manifest in found for section in manifest.sections}
        flushed = [
            m.FlushedPartition(
                backlog.partition_id, backlog.topic, manifest.first_offset,
                backlog.end_offset, manifest.number,
            )
            for backlog, manifest in zip(backlogs, found, strict=True)
        ]  # fmt: skip
        hold: Hold | None = None
        if asked.hold_seconds:
            wall_ns = state.clock.wall_ns()
            topic = backlogs[0].topic
            make = partial(make_hold, store, sorted(keys), asked.hold_seconds, wall_ns, topic)
            hold = yield Do(make)
        return m.Flushed(
            store.url, state.identity.hex(), flushed, hold.key if hold is not None else "",
            _expires(hold) if hold is not None else 0,
        )  # fmt: skip

    def _uploaded(
        self, backlogs: Sequence[m.Backlog], asked: m.FlushHistory, deadline_ns: int
    ) -> Task:
        """Wait until partitions are uploaded; their manifests. Raises DeadlineExceeded."""
        state = self._state
        manifests: list[Manifest] = []
        for backlog in backlogs:
            self._rounds.want(backlog.partition_id, backlog.end_offset)
        for backlog in backlogs:
            history: History = yield from state.history(backlog.partition_id, backlog.manifest)
            while history.manifest.end_offset < backlog.end_offset or not history.agrees:
                if state.clock.monotonic_ns() >= deadline_ns:
                    raise DeadlineExceeded(
                        f"{backlog.topic} was not uploaded within {asked.timeout_ms / 1000:g} s: "
                        f"{state.fault or 'the store is slow'}; it goes on"
                    )
                yield Pause(LOOK_NS)
                history = yield from state.history(backlog.partition_id, backlog.manifest)
            manifests.append(history.manifest)
        return manifests

    def _copied(
        self, log_only: Sequence[tuple[int, m.Backlog]], deadline_ns: int, keys: set[str]
    ) -> Task:
        """Copy partitions without history; their manifests. Raises DanubeError."""
        manifests: list[Manifest] = []
        for worker, backlog in log_only:
            manifests.append((yield from self._copies.copy(worker, backlog, deadline_ns, keys)))
        return manifests

    # ------------------------------------------------------------ who has them

    def _backlogs(self, partition_ids: list[int]) -> Task:
        """Ask the owners of partitions with history where they end; by id."""
        state = self._state
        found: dict[int, m.Backlog] = {}
        for worker in state.boot.config.processes.workers:
            asked = m.ListBacklogs(state.epoch, state.fault, partition_ids)
            listed: m.Listed = yield Ask(worker, asked)
            found |= {backlog.partition_id: backlog for backlog in listed.backlogs}
        return found

    def _log_only(self, asked: m.FlushHistory, missing: Sequence[int]) -> Task:
        """Ask for the owners of partitions without history. Raises FailedPrecondition unless they are to be held,
        Unavailable while they move."""
        state = self._state
        found: dict[int, tuple[int, m.Backlog]] = {}
        for worker in state.boot.config.processes.workers:
            listed: list[m.Backlog] = yield Ask(worker, m.ListLogOnly(state.epoch, [*missing]))
            found |= {backlog.partition_id: (worker, backlog) for backlog in listed}
        if len(found) < len(asked.partition_ids):
            raise Unavailable("the topic is being moved or changed just now; try again")
        if not asked.hold_seconds:
            topic = found[missing[0]][1].topic
            raise FailedPrecondition(
                f"{topic} has no history: its policy is not `forever` or `until_expired`; set retention_policy, or "
                "flush it with a hold, which is given a copy of what the log has"
            )
        return [found[number] for number in asked.partition_ids]


def _expires(hold: Hold) -> int:
    """When a hold ends, Unix time in seconds."""
    return hold.expires_ms * MILLISECOND_NS // SECOND_NS
