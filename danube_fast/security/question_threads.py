"""Questions to a component of another package, each in a thread, so many at a time.

    ask --> queues of its asker, the askers in turn --> a thread --> Outcome
              |                                           '--no end in time: lost until there is one
              '--cancelled: it is not asked any more

Threads cannot be ended, so those that hang stay. No asker has all of them, and with `Spare` a lost one is replaced, and
counts against its asker alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

from danube_fast.clock import SECOND_NS, Clock

__all__ = [
    "ANSWER_SECONDS",
    "REPLACED_MAX",
    "THREADS_MAX",
    "THREADS_OF_ONE_MAX",
    "Outcome",
    "QuestionThreads",
    "Spare",
]

ANSWER_SECONDS = 5.0
"""For a thread to be free, and for the answer. A client has given up soon after."""
THREADS_MAX = 32
"""Threads of a component, without those that are lost in questions that hang, as far as these are replaced."""
THREADS_OF_ONE_MAX = 8
"""Threads of one asker, if it gets answers."""
REPLACED_MAX = 224
"""Lost threads that are replaced."""
AGAIN_NS = 10 * SECOND_NS
"""An urgent asker whose threads are lost has another one after so long, or as long again as it has lost some: the
component may have been mended, and what it was asked before hangs on."""


class Outcome:
    """End of a question: what the component has returned, or raised."""

    def __init__(self, found: Any, error: BaseException | None) -> None:
        self.found, self.error = found, error


class _Question(NamedTuple):
    work: Callable[[], Any]
    answer: Future[Outcome]


_Queues = tuple[deque[_Question], deque[_Question]]
"""Questions of an asker that come first, and the others; each in their order."""


class Spare(NamedTuple):
    """Threads for what hangs."""

    clock: Clock
    reserved: int
    """Of the threads, those for questions that are `urgent`."""
    replaced_max: int
    """Lost threads that are replaced; more are taken from those that are not reserved."""
    lost_of_one_max: int
    """With so many lost threads, an asker has none beside. It begins with so many, too, and has one more for each answer
    in time: all that it has may be lost at one time."""


class _Asker:
    """Threads of an asker that has some."""

    __slots__ = ("again_ns", "asking", "is_urgent", "lost", "may_have", "since_ns")

    def __init__(self, may_have: int) -> None:
        self.asking = 0
        """How many they are, lost ones too."""
        self.lost = 0
        self.may_have = may_have
        self.is_urgent = False
        self.since_ns = 0
        """When it began to lose them."""
        self.again_ns = 0
        """When it has another one, if it is urgent."""


class QuestionThreads:
    """Ask one component. Any thread may use it."""

    def __init__(
        self, name: str, threads_max: int, of_one_max: int = 0, spare: Spare | None = None
    ) -> None:
        """`of_one_max`: threads of one asker; 0: all of them."""
        self._name, self._threads_max, self._spare = name, threads_max, spare
        self._of_one_max = of_one_max or threads_max
        self._lost_of_one_max = self._of_one_max if spare is None else spare.lost_of_one_max
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, _Queues] = {}
        self._urgent: set[Hashable] = set()
        """Of those that wait, those that may have reserved threads."""
        self._askers: dict[Hashable, _Asker] = {}
        self._busy: dict[int, tuple[Hashable, int]] = {}
        """By the thread: asker and beginning of its question, the oldest first; lost ones are in here no more."""
        self.running = 0
        """Threads that there are."""
        self.lost = 0
        """Of these, those whose question had no answer in time."""

    def ask(
        self, work: Callable[[], Any], asker: Hashable = "", *, is_first: bool = False, is_urgent: bool = False,
    ) -> Future[Outcome]:  # fmt: skip
        """Do that in a thread, before others of the asker that are not, if it `is_first`. All of one asker are urgent, or
        none. Raises RuntimeError if no thread can be made."""
        question = _Question(work, Future())
        with self._lock:
            queues = self._waiting.setdefault(asker, (deque(), deque()))
            _trim(queues)
            queue = queues[0 if is_first else 1]
            queue.append(question)
            if is_urgent:
                self._urgent.add(asker)
            try:
                self._start(asker)
            except RuntimeError:
                queue.remove(question)
                if not any(queues):
                    self._forget(asker)
                raise
        return question.answer

    @property
    def at_it(self) -> str:
        """How many threads there are, and lost ones, in words for a log."""
        return f"{self.running} threads ask it, and {self.lost} of them have waited for more than {ANSWER_SECONDS:g} s"

    def is_held_up(self, asker: Hashable) -> bool:
        """Whether so many threads of an asker are lost that it has no other before one of them ends."""
        with self._lock:
            known = self._askers.get(asker)
            return (
                known is not None
                and known.lost >= self._lost_of_one_max
                and not self._tries_again(known)
            )

    def replace_lost(self) -> None:
        """Find the threads that are lost, and start others for what waits; to be called again and again."""
        if self._spare is None:
            return
        with self._lock:
            now_ns = self._spare.clock.monotonic_ns()
            late_ns = now_ns - int(ANSWER_SECONDS * SECOND_NS)
            late = list(takewhile(lambda each: each[1][1] <= late_ns, self._busy.items()))
            for thread, (asker, _) in late:
                del self._busy[thread]
                self.lost += 1
                known = self._askers[asker]
                known.since_ns = known.since_ns if known.lost else now_ns
                known.lost += 1
                known.may_have = self._lost_of_one_max
                known.again_ns = now_ns + max(AGAIN_NS, now_ns - known.since_ns)
            for asker, queues in list(self._waiting.items()):
                _trim(queues)
                if not any(queues):
                    self._forget(asker)
                    continue
                with suppress(RuntimeError):  # no thread can be made just now
                    self._start(asker)

    def _start(self, asker: Hashable) -> None:
        """Start a thread if the asker may have one more. Raises RuntimeError if none can be made."""
        if self._may_have_more(asker) and self._threads_left(asker) > 0:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self.running += 1

    def _may_have_more(self, asker: Hashable) -> bool:
        known = self._askers.get(asker)
        if known is None:
            return True
        has_room = known.asking < known.may_have and known.lost < self._lost_of_one_max
        return has_room or self._tries_again(known)

    def _tries_again(self, known: _Asker) -> bool:
        """Whether an asker that has lost threads may have one more, as it waited long enough."""
        if self._spare is None or not known.is_urgent or not known.asking == known.lost > 0:
            return False
        if self.lost >= self._spare.replaced_max:  # or one asker had all of them one day
            return False
        return self._spare.clock.monotonic_ns() >= known.again_ns

    def _threads_left(self, asker: Hashable) -> int:
        """How many threads may be started for the asker; below 0: there are too many."""
        left = self._threads_max - self.running
        if self._spare is not None:
            left += min(self.lost, self._spare.replaced_max)
            left -= 0 if asker in self._urgent else self._spare.reserved
        return left

    def _run(self) -> None:
        """Answer questions until none is left that may be asked."""
        asker = None
        while (taken := self._take(asker)) is not None:
            asker, question = taken
            try:
                outcome = Outcome(question.work(), None)
            except BaseException as error:  # a foreign package may raise SystemExit
                outcome = Outcome(None, error)
            question.answer.set_result(outcome)

    def _take(self, done: Hashable | None) -> tuple[Hashable, _Question] | None:
        """Take the next question of a thread that has one of the asker `done` behind it; None: the thread ends."""
        with self._lock:
            if done is not None:
                self._end(done)
            for asker, queues in list(self._waiting.items()):
                # this thread is one of those that there are
                if not self._may_have_more(asker) or self._threads_left(asker) < 0:
                    continue
                question = _next(queues)
                if question is not None:
                    self._begin(asker)
                self._waiting[asker] = self._waiting.pop(asker)  # behind the others
                if not any(queues):
                    self._forget(asker)
                elif question is not None:
                    with suppress(RuntimeError):  # this one goes on
                        self._start(asker)
                if question is not None:
                    return asker, question
            self.running -= 1
            return None

    def _begin(self, asker: Hashable) -> None:
        known = self._askers.setdefault(asker, _Asker(self._lost_of_one_max))
        known.asking += 1
        known.is_urgent = asker in self._urgent
        now_ns = 0 if self._spare is None else self._spare.clock.monotonic_ns()
        self._busy[threading.get_ident()] = asker, now_ns

    def _end(self, asker: Hashable) -> None:
        known = self._askers[asker]
        known.asking -= 1
        if self._busy.pop(threading.get_ident(), None) is None:
            self.lost -= 1
            known.lost -= 1
        else:
            known.may_have = min(known.may_have + 1, self._of_one_max)
        if not known.asking and asker not in self._waiting:
            del self._askers[asker]

    def _forget(self, asker: Hashable) -> None:
        """Note that nothing of an asker waits."""
        del self._waiting[asker]
        self._urgent.discard(asker)
        if asker in self._askers and not self._askers[asker].asking:
            del self._askers[asker]


def _trim(queues: _Queues) -> None:
    """Take out what is in front and was cancelled."""
    for queue in queues:
        while queue and queue[0].answer.cancelled():
            queue.popleft()


def _next(queues: _Queues) -> _Question | None:
    """Take the next question that was not cancelled."""
    for queue in queues:
        while queue:
            question = queue.popleft()
            if question.answer.set_running_or_notify_cancel():
                return question
    return None
