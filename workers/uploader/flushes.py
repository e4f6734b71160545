"""Flushes that were asked for: upload all of some partitions up to now, and hold the objects for a reader outside.

The reader renews its hold while it reads, and releases it then.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from danube_fast.broker import messages as m
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import DanubeError, DeadlineExceeded, FailedPrecondition
from danube_fast.history.holds import Hold, make_hold, release_hold, renew_hold
from danube_fast.workers.process.mailbox import Request
from danube_fast.workers.process.tasks import Ask, Do, Pause, Task
from danube_fast.workers.uploader.rounds import Rounds
from danube_fast.workers.uploader.state import History, UploaderState

__all__ = ["Flushes"]

LOOK_NS = 20 * MILLISECOND_NS


class Flushes:
    """Answer flushes, and what is asked about their holds."""

    def __init__(self, state: UploaderState, rounds: Rounds) -> None:
        self._state, self._rounds = state, rounds
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
        hold: Hold = yield Do(partial(renew_hold, store, asked.hold, asked.hold_seconds, clock))
        return m.RenewedHold(hold.key, _expires(hold))

    def _released(self, asked: m.ReleaseHold) -> Task:
        yield Do(partial(release_hold, self._state.store, asked.hold))

    def _flushed(self, asked: m.FlushHistory) -> Task:
        state = self._state
        deadline_ns = state.clock.monotonic_ns() + asked.timeout_ms * MILLISECOND_NS
        while state.is_starting and state.clock.monotonic_ns() < deadline_ns:
            yield Pause(LOOK_NS)
        store = state.store
        found = yield from self._backlogs(asked.partition_ids)
        flushed: list[m.FlushedPartition] = []
        keys: set[str] = set()
        for backlog in found:
            self._rounds.want(backlog.partition_id, backlog.end_offset)
        for backlog in found:
            history: History = yield from state.history(backlog.partition_id, backlog.manifest)
            while history.manifest.end_offset < backlog.end_offset or not history.agrees:
                if state.clock.monotonic_ns() >= deadline_ns:
                    raise DeadlineExceeded(
                        f"{backlog.topic} was not uploaded within {asked.timeout_ms / 1000:g} s: "
                        f"{state.fault or 'the store is slow'}; it goes on"
                    )
                yield Pause(LOOK_NS)
                history = yield from state.history(backlog.partition_id, backlog.manifest)
            manifest = history.manifest
            keys |= {section.key for section in manifest.sections}
            flushed.append(
                m.FlushedPartition(
                    backlog.partition_id, backlog.topic, manifest.first_offset,
                    backlog.end_offset, manifest.number,
                )
            )  # fmt: skip
        hold: Hold | None = None
        if asked.hold_seconds:
            wall_ns = state.clock.wall_ns()
            hold = yield Do(partial(make_hold, store, sorted(keys), asked.hold_seconds, wall_ns))
        return m.Flushed(
            store.url, state.identity.hex(), flushed, hold.key if hold is not None else "",
            _expires(hold) if hold is not None else 0,
        )  # fmt: skip

    def _backlogs(self, partition_ids: list[int]) -> Task:
        """Ask the owners of partitions where they end. Raises FailedPrecondition if one has no history."""
        state = self._state
        found: dict[int, m.Backlog] = {}
        for worker in state.boot.config.processes.workers:
            asked = m.ListBacklogs(state.epoch, state.fault, partition_ids)
            listed: m.Listed = yield Ask(worker, asked)
            found |= {backlog.partition_id: backlog for backlog in listed.backlogs}
        missing = [number for number in partition_ids if number not in found]
        if missing:
            raise FailedPrecondition(
                "the topic has no history: its policy is not `forever` or `until_expired`, or it is just being "
                "moved; set retention_policy, or try again"
            )
        return [found[number] for number in partition_ids]


def _expires(hold: Hold) -> int:
    """When a hold ends, Unix time in seconds."""
    return hold.expires_ms * MILLISECOND_NS // SECOND_NS
