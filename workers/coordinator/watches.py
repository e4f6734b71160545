r"""WATCH: clients that want to hear when topics come, go or grow, each with one request that waits.

    WATCH(cursor, patterns) --> answered at once if something changed behind the cursor
                            \-> parked until something does, or its time is up

The topics themselves are in the directory, which counts its changes; one look a turn tells whether
there are any.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from danube_fast.broker.admin.registry import Steps
from danube_fast.broker.topics.changes import Change
from danube_fast.broker.topics.directory import TopicDirectory
from danube_fast.clock import MILLISECOND_NS, NEVER_NS, Clock
from danube_fast.errors import DanubeError, Internal, InvalidArgument
from danube_fast.net import protocol
from danube_fast.net.session import Session
from danube_fast.security.authorization import Authorizer
from danube_fast.types import REPLY_TOPICS, TopicPattern
from danube_fast.undecided import when_decided
from danube_fast.visible import Visible, common, narrowest
from danube_fast.workers.coordinator.connections import Connections

__all__ = ["Watches"]

_log = logging.getLogger(__name__)

WAIT_MS_MAX = 600_000
PATTERNS_MAX = 256
ENDS_MIN = 64
"""So many ends of watches that are parked no more are kept at least."""


class _Watch:
    """A WATCH that waits."""

    __slots__ = ("command", "deadline_ns", "key", "patterns", "place", "principal")

    def __init__(
        self,
        principal: str,
        command: protocol.Watch,
        deadline_ns: int,
        cursor: tuple[int, int] | None,
    ) -> None:
        if len(command.patterns) > PATTERNS_MAX:
            raise InvalidArgument(f"one WATCH has at most {PATTERNS_MAX} patterns; use wider ones")
        self.principal, self.command = principal, command
        self.patterns = [TopicPattern(text) for text in command.patterns]
        self.deadline_ns = deadline_ns
        self.place: int | None = None
        """So many changes were looked at, by what was shown then; None: the client begins anew."""
        self.key = 0
        if cursor is not None:
            self.place, self.key = cursor

    def matches(self, topic: str) -> bool:
        """Whether one of the patterns matches."""
        return any(pattern.matches(topic) for pattern in self.patterns)


class Watches:
    """Answer the watches of all sessions, one for each."""

    def __init__(
        self, topics: TopicDirectory, connections: Connections, authorizer: Authorizer, clock: Clock,
        in_slices: Callable[[str, Steps], None],
    ) -> None:  # fmt: skip
        """`in_slices` takes steps for a principal, a slice of them in each turn."""
        self._in_slices = in_slices
        self._topics, self._connections, self._authorizer = topics, connections, authorizer
        self._clock = clock
        self._newest: dict[int, _Watch] = {}
        """By the session's number: parked, or being looked at; of sessions that have ended, too, for a while."""
        self._parked: dict[int, _Watch] = {}
        self._ends: list[tuple[int, int]] = []
        """A heap of when watches are over, and of whose: of those that are parked, and of some that were."""
        self._seen = topics.changes.count
        connections.commands.handlers[protocol.Watch] = self._watch

    def _watch(self, session: Session, command: protocol.Watch) -> None:
        wait_ns = min(max(command.wait_ms, 0), WAIT_MS_MAX) * MILLISECOND_NS
        deadline_ns = self._clock.monotonic_ns() + wait_ns
        watch = _Watch(
            session.principal, command, deadline_ns, self._topics.changes.read(command.cursor)
        )
        self._replace(session.number)
        self._newest[session.number] = watch
        self._look(session.number, watch)

    def do_work(self, now_ns: int) -> int:
        """Answer watches with changes, and those whose time is up; how many were looked at."""
        count = self._topics.changes.count
        if count != self._seen and self._has_news(count):
            parked, self._parked, self._ends = self._parked, {}, []
        elif now_ns >= self.next_deadline_ns():
            parked = self._take_ended(now_ns)
        else:
            return 0
        for number, watch in parked.items():
            when_decided(partial(self._look, number, watch), partial(self._fail, number, watch))
        return len(parked)

    def _has_news(self, count: int) -> bool:
        """Whether something has changed since that watches tell: reply topics, which they do not, come and go all the time."""
        news, self._seen = self._topics.changes.behind(self._seen), count
        return news is None or not all(topic.startswith(REPLY_TOPICS) for _, topic in news)

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
        """Answer a watch if there is news, or its time is up; park it otherwise. Raises ResourceExhausted, and Unavailable or
        Undecided whatever there is to show, so that neither an answer nor its time tells hidden names."""
        if not self._is_open(number):
            self._newest.pop(number, None)
            return
        if self._newest.get(number) is not watch:
            self._answer(number, watch, [])
            return
        try:
            visible = self._authorizer.visible_to(watch.principal)
            self._in_slices(str(watch.principal), self._guarded(number, watch, visible))
        except DanubeError:
            raise
        except Exception as fault:  # the others go on
            self._fail_by(fault, number, watch)

    def _is_open(self, number: int) -> bool:
        return self._connections.sessions.by_number(number) is not None

    def _guarded(self, number: int, watch: _Watch, visible: Visible) -> Steps:
        """Take the steps of a look while they are wanted."""
        try:
            for _ in self._steps(number, watch, visible):
                if not self._is_open(number):
                    self._newest.pop(number, None)
                    return
                if self._newest.get(number) is not watch:
                    self._answer(number, watch, [])
                    return
                yield None
        except Exception as fault:  # of one client
            self._fail_by(fault, number, watch)

    def _fail_by(self, fault: Exception, number: int, watch: _Watch) -> None:
        _log.error("a WATCH failed", exc_info=fault)
        self._fail(number, watch, Internal(f"WATCH failed: {fault!r}; see the broker's log"))

    def _steps(self, number: int, watch: _Watch, visible: Visible) -> Steps:
        """Look at what has changed, and at what changes meanwhile; at all if something else is shown than before."""
        changes, news = self._topics.changes, list[list[str]]()
        while watch.place != changes.count or watch.key != visible.key:
            some = None
            if watch.place is not None and watch.key == visible.key:
                some = changes.behind(watch.place)
            if some is None:
                yield from self._list(number, watch, visible)
                return
            place = changes.count
            for kind, topic in some:
                # in this order a hidden name costs what it costs, whether it matches or not
                if _is_told(topic, visible) and (kind is Change.GROWN or watch.matches(topic)):
                    news.append([kind.value, topic])
                yield None
            watch.place = place
        if news or watch.deadline_ns <= self._clock.monotonic_ns():
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
        if len(self._newest) > 2 * len(sessions) + ENDS_MIN:
            for number in [each for each in self._newest if sessions.by_number(each) is None]:
                del self._newest[number]
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

    def _answer(self, number: int, watch: _Watch, news: list[list[str]]) -> None:
        cursor = self._topics.changes.cursor_at(watch.place or 0, watch.key)
        self._reply(number, watch, {"cursor": cursor, "changes": news})

    def _list(self, number: int, watch: _Watch, visible: Visible) -> Steps:
        """Answer with all topics that a watch matches, in steps. What changes meanwhile stands behind the cursor."""
        cursor = self._topics.changes.cursor_at(self._topics.changes.count, visible.key)
        fronts = narrowest(pattern.front for pattern in watch.patterns)
        topics: list[str] = []
        for record in self._topics.by_name.behind("", common(fronts, visible.fronts)):
            if _is_told(record.topic, visible) and watch.matches(record.topic):
                topics.append(record.topic)
            yield None
        self._reply(number, watch, {"cursor": cursor, "topics": topics})

    def _fail(self, number: int, watch: _Watch, error: DanubeError) -> None:
        self._end(number, watch, protocol.Error(watch.command.request, error.code, str(error)))

    def _reply(self, number: int, watch: _Watch, value: dict[str, Any]) -> None:
        self._end(number, watch, protocol.Result(watch.command.request, value))

    def _end(self, number: int, watch: _Watch, answer: protocol.ServerCommand) -> None:
        if self._newest.get(number) is watch:
            del self._newest[number]
        self._connections.reply(number, answer)


def _is_told(topic: str, visible: Visible) -> bool:
    """Whether a client is told of a topic that it may look up: the name of a reply topic is a secret."""
    is_secret = topic.startswith(REPLY_TOPICS)
    return not is_secret and topic.startswith(visible.fronts) and visible.shows(topic)
