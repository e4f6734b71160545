"""Questions to a component of another package, each in a thread, so many at a time.

    ask --> queues of its asker, the askers in turn --> a thread --> Outcome
              '--cancelled: it is not asked any more

Threads cannot be ended, so those that hang stay; the others go on, and no asker has all of them.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

__all__ = ["ANSWER_SECONDS", "Outcome", "QuestionThreads"]

ANSWER_SECONDS = 5.0
"""For a thread to be free, and for the answer. A client has given up soon after."""


class Outcome:
    """End of a question: what the component has returned, or raised."""

    def __init__(self, found: Any, error: BaseException | None) -> None:
        self.found, self.error = found, error


class _Question(NamedTuple):
    work: Callable[[], Any]
    answer: Future[Outcome]


_Queues = tuple[deque[_Question], deque[_Question]]
"""Questions of an asker that come first, and the others; each in their order."""


class QuestionThreads:
    """Ask one component. Any thread may use it."""

    def __init__(self, name: str, threads_max: int, of_one_max: int = 0) -> None:
        """`of_one_max`: threads of one asker; 0: all of them."""
        self._name, self._threads_max = name, threads_max
        self._of_one_max = of_one_max or threads_max
        self._lock = threading.Lock()
        self._waiting: dict[str, _Queues] = {}
        self._asking: Counter[str] = Counter()
        self.running = 0
        """Threads that there are."""

    def ask(
        self, work: Callable[[], Any], asker: str = "", *, is_first: bool = False
    ) -> Future[Outcome]:
        """Do that in a thread, before others of the asker that are not, if it `is_first`. Raises RuntimeError if no thread can be made."""
        question = _Question(work, Future())
        with self._lock:
            queues = self._waiting.setdefault(asker, (deque(), deque()))
            for queue in queues:
                while queue and queue[0].answer.cancelled():
                    queue.popleft()
            queue = queues[0 if is_first else 1]
            queue.append(question)
            if self.running < self._threads_max and self._asking[asker] < self._of_one_max:
                try:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                except RuntimeError:
                    queue.remove(question)
                    if not any(queues):
                        del self._waiting[asker]
                    raise
                self.running += 1
        return question.answer

    def _run(self) -> None:
        """Answer questions until none is left that may be asked."""
        asker = None
        while (taken := self._take(asker)) is not None:
            asker, question = taken
            if not question.answer.set_running_or_notify_cancel():
                continue
            try:
                outcome = Outcome(question.work(), None)
            except BaseException as error:  # a foreign package may raise SystemExit
                outcome = Outcome(None, error)
            question.answer.set_result(outcome)

    def _take(self, done: str | None) -> tuple[str, _Question] | None:
        """Take the next question of a thread that has one of the asker `done` behind it; None: the thread ends."""
        with self._lock:
            if done is not None:
                self._asking[done] -= 1
                if not self._asking[done]:
                    del self._asking[done]
            for asker, queues in self._waiting.items():
                if self._asking[asker] >= self._of_one_max:
                    continue
                del self._waiting[asker]
                question = (queues[0] or queues[1]).popleft()
                if any(queues):  # behind the others
                    self._waiting[asker] = queues
                self._asking[asker] += 1
                return asker, question
            self.running -= 1
            return None
