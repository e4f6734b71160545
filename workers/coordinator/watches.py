r"""WATCH: clients that want to hear when topics come, go or grow, each with one request that waits.

    WATCH(cursor, patterns) --> answered at once if something changed behind the cursor
                            \-> parked until something does, or its time is up

The topics themselves are in the directory, which counts its changes; one look a turn tells whether
there are any.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any

from danube_fast.broker.topics.changes import Change
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.broker.topics.records import TopicRecord
from danube_fast.clock import MILLISECOND_NS, Clock
from danube_fast.errors import DanubeError, InvalidArgument, PermissionDenied
from danube_fast.net import protocol
from danube_fast.net.session import Session
from danube_fast.security.authorization import Authorizer
from danube_fast.types import REPLY_TOPICS, Permission, TopicPattern
from danube_fast.undecided import Steps, allowed, sift, unnamed, when_decided
from danube_fast.workers.coordinator.connections import Connections
from danube_fast.workers.process.mailbox import NEVER_NS

__all__ = ["Watches"]

WAIT_MS_MAX = 600_000
PATTERNS_MAX = 256
ENDS_MIN = 64
"""So many ends of watches that are parked no more are kept at least."""


class _Watch:
    """A WATCH that waits."""

    __slots__ = ("authorizer", "command", "deadline_ns", "patterns", "principal")

    def __init__(
        self, principal: str, command: protocol.Watch, deadline_ns: int, authorizer: Authorizer
    ) -> None:
        if len(command.patterns) > PATTERNS_MAX:
            raise InvalidArgument(f"one WATCH has at most {PATTERNS_MAX} patterns; use wider ones")
        self.principal, self.authorizer, self.command = principal, authorizer, command
        self.patterns = [TopicPattern(text) for text in command.patterns]
        self.deadline_ns = deadline_ns

    def may_see(self, topic: str) -> bool:
        """Whether the client may look that topic up. The name of a reply topic is a secret. Raises Unavailable, Undecided."""
        if topic.startswith(REPLY_TOPICS):
            return False
        try:
            with unnamed(topic):
                self.authorizer.authorize(self.principal, Permission.LOOKUP, topic)
        except PermissionDenied:
            return False
        return True

    def concerns(self, change: tuple[Change, str]) -> bool:
        """Whether the client is told of a change. Raises Unavailable, Undecided."""
        kind, topic = change
        return (kind is Change.GROWN or self.matches(topic)) and self.may_see(topic)

    def shows(self, record: TopicRecord) -> bool:
        """Whether the client is told of a topic. Raises Unavailable, Undecided."""
        return self.matches(record.topic) and self.may_see(record.topic)

    def matches(self, topic: str) -> bool:
        """Whether one of the patterns matches."""
        return any(pattern.matches(topic) for pattern in self.patterns)


class Watches:
    """Answer the watches of all sessions, one for each."""

    def __init__(
        self, topics: TopicDirectory, connections: Connections, authorizer: Authorizer, clock: Clock,
        in_slices: Callable[[Steps], None],
    ) -> None:  # fmt: skip
        """`in_slices` takes steps, a slice of them in each turn."""
        self._in_slices = in_slices
        self._topics, self._connections, self._authorizer = topics, connections, authorizer
        self._clock = clock
        self._parked: dict[int, _Watch] = {}
        self._ends: list[tuple[int, int]] = []
        """A heap of when watches are over, and of whose: of those that are parked, and of some that were."""
        self._seen = topics.changes.count
        connections.commands.handlers[protocol.Watch] = self._watch

    def _watch(self, session: Session, command: protocol.Watch) -> None:
        wait_ns = min(max(command.wait_ms, 0), WAIT_MS_MAX) * MILLISECOND_NS
        deadline_ns = self._clock.monotonic_ns() + wait_ns
        watch = _Watch(session.principal, command, deadline_ns, self._authorizer)
        self._replace(session.number)
        self._look(session.number, watch)

    def do_work(self, now_ns: int) -> int:
        """Answer watches with changes, and those whose time is up; how many were looked at."""
        count = self._topics.changes.count
        if count != self._seen:
            self._seen = count
            parked, self._parked, self._ends = self._parked, {}, []
        elif now_ns >= self.next_deadline_ns():
            parked = self._take_ended(now_ns)
        else:
            return 0
        for number, watch in parked.items():
            when_decided(partial(self._look, number, watch), partial(self._fail, number, watch))
        return len(parked)

    def _take_ended(self, now_ns: int) -> dict[int, _Watch]:
        """Take the watches whose time is up from those that are parked."""
        ended = {}
        while self._ends and self._ends[0][0] <= now_ns:
            _, number = heapq.heappop(self._ends)
            watch = self._parked.get(number)
            if watch is not None and watch.deadline_ns <= now_ns:
                ended[number] = self._parked.pop(number)
        return ended

    def _look(self, number: int, watch: _Watch) -> None:
        """Answer a watch if there is news, or its time is up; park it otherwise. Raises Undecided."""
        if self._connections.sessions.by_number(number) is None:
            return
        news, now_ns = self._news(watch), self._clock.monotonic_ns()
        if news is None or news or watch.deadline_ns <= now_ns:
            self._answer(number, watch, news)
            return
        self._replace(number)  # one that came while this one waited for an answer about a right
        self._parked[number] = watch
        heapq.heappush(self._ends, (watch.deadline_ns, number))
        self._clear_up()

    def _clear_up(self) -> None:
        """Forget watches of sessions that have ended, and ends of watches that are parked no more, once there are many."""
        sessions = self._connections.sessions
        if len(self._parked) > 2 * len(sessions) + ENDS_MIN:
            gone = [number for number in self._parked if sessions.by_number(number) is None]
            for number in gone:
                del self._parked[number]
        if len(self._ends) > 2 * len(self._parked) + ENDS_MIN:
            self._ends = sorted((each.deadline_ns, of) for of, each in self._parked.items())

    def _replace(self, number: int) -> None:
        """Answer the watch of a session that is parked: another one takes its place."""
        before = self._parked.pop(number, None)
        if before is not None:
            self._answer(number, before, [])

    def next_deadline_ns(self) -> int:
        """When `do_work` must run again at the latest."""
        return self._ends[0][0] if self._ends else NEVER_NS

    def _news(self, watch: _Watch) -> list[tuple[Change, str]] | None:
        """Find the changes that concern a watch; None if its cursor is too old to tell."""
        changes = self._topics.changes.since(watch.command.cursor)
        if not changes:
            return changes
        return allowed(changes, watch.concerns)

    def _answer(self, number: int, watch: _Watch, news: list[tuple[Change, str]] | None) -> None:
        cursor = self._topics.changes.cursor
        if news is None:
            self._in_slices(self._list_or_fail(number, watch, cursor))
            return
        changes = [[change.value, topic] for change, topic in news]
        self._reply(number, watch, {"cursor": cursor, "changes": changes})

    def _list_or_fail(self, number: int, watch: _Watch, cursor: str) -> Steps:
        try:
            yield from self._list(number, watch, cursor)
        except DanubeError as error:  # the client asks again
            self._fail(number, watch, error)

    def _list(self, number: int, watch: _Watch, cursor: str) -> Steps:
        """Answer with all topics that a watch matches, in steps. What changes meanwhile stands behind the cursor. Patterns
        are asked about first, as names: those that are no topics, too, so that the time does not tell them from hidden ones."""
        names = dict.fromkeys(each.text for each in watch.patterns)
        seen: list[str] = []
        yield from sift(names, watch.may_see, seen)

        def shows(record: TopicRecord) -> bool:
            return record.topic in seen if record.topic in names else watch.shows(record)

        found: list[TopicRecord] = []
        yield from sift(self._topics.by_name.behind(""), shows, found)
        topics = [record.topic for record in found]
        self._reply(number, watch, {"cursor": cursor, "topics": topics})

    def _fail(self, number: int, watch: _Watch, error: DanubeError) -> None:
        answer = protocol.Error(watch.command.request, error.code, str(error))
        self._connections.reply(number, answer)

    def _reply(self, number: int, watch: _Watch, value: dict[str, Any]) -> None:
        self._connections.reply(number, protocol.Result(watch.command.request, value))
