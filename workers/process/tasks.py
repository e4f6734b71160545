"""Tasks: work that waits for threads, other processes and the clock, each written as one generator.

    runs = yield Ask(worker, m.HistoryRuns(...))       another process answers
    data = yield Do(lambda: store.read(key))           a thread does it
    yield Pause(SECOND_NS)
    part = yield Fork(self._send(part))                another task, which goes on beside this one
    yield Join(part)                                   its result

The value of a step comes back from `yield`; a DanubeError that prevented it is raised there. One loop drives
all tasks; nothing of them runs in another thread but the work of `Do`.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from danube_fast.broker.messages import Message
from danube_fast.clock import NEVER_NS, Clock
from danube_fast.errors import DanubeError, Internal
from danube_fast.wal.background import StartWork
from danube_fast.workers.process.mailbox import Mailbox, Reply

__all__ = ["Ask", "Do", "Fork", "Join", "Pause", "Running", "Task", "Tasks"]

_log = logging.getLogger(__name__)


class Ask(NamedTuple):
    """Ask another process; the value of its answer."""

    peer: int
    message: Message
    timeout_ms: int = 30_000


class Do(NamedTuple):
    """Let a thread do something that may wait; the value that it returns."""

    work: Callable[[], Any]
    is_gentle: bool = False
    """All else that wants the processor comes first."""


class Pause(NamedTuple):
    """Go on after so many nanoseconds."""

    ns: int


class Fork(NamedTuple):
    """Start another task; its `Running`, at once."""

    task: Task


class Join(NamedTuple):
    """Wait for a task; the value that it returns."""

    running: Running


Step = Ask | Do | Pause | Fork | Join
Task = Generator[Step, Any, Any]


class Running:
    """A task that was started."""

    __slots__ = ("error", "is_over", "joined", "result", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.is_over = False
        self.result: Any = None
        self.error: DanubeError | None = None
        self.joined: list[Running] = []
        """Tasks that wait for its end."""


class _Work:
    """Something that a thread does."""

    __slots__ = ("error", "is_over", "result", "waiting", "work")

    def __init__(self, work: Callable[[], Any], waiting: Running) -> None:
        self.work, self.waiting = work, waiting
        self.is_over = False
        self.result: Any = None
        self.error: DanubeError | None = None

    def run(self) -> None:
        """Run in a thread."""
        try:
            self.result = self.work()
        except DanubeError as error:
            self.error = error
        except Exception as error:  # a thread must not end without a word
            _log.exception("work of a task failed")
            self.error = Internal(f"{error!r}; see the broker's log")
        self.is_over = True


class Tasks:
    """Run the tasks of one process. Used by its loop alone."""

    def __init__(self, mailbox: Mailbox, start_work: StartWork, clock: Clock) -> None:
        """`start_work`: see `Background.make_fetch`."""
        self._mailbox, self._start_work, self._clock = mailbox, start_work, clock
        self._ready: list[tuple[Running, Any, DanubeError | None]] = []
        self._work: list[_Work] = []
        self._pauses: list[tuple[int, int, Running]] = []
        self._count = 0

    def start(self, task: Task) -> Running:
        """Begin a task; its first step is taken in the next `do_work`."""
        running = Running(task)
        self._ready.append((running, None, None))
        return running

    def wake(self, running: Running) -> None:
        """End the pause of a task, if it is in one."""
        for pause in self._pauses:
            if pause[2] is running:
                self._pauses.remove(pause)
                heapq.heapify(self._pauses)
                self._ready.append((running, None, None))
                return

    def do_work(self, now_ns: int) -> int:
        """Let the tasks go on whose steps have ended; how many."""
        for work in [each for each in self._work if each.is_over]:
            self._work.remove(work)
            self._ready.append((work.waiting, work.result, work.error))
        while self._pauses and self._pauses[0][0] <= now_ns:
            self._ready.append((heapq.heappop(self._pauses)[2], None, None))
        done = 0
        while self._ready:
            ready, self._ready = self._ready, []
            done += len(ready)
            for running, value, error in ready:
                self._go_on(running, value, error)
        return done

    def next_deadline_ns(self) -> int:
        """When `do_work` must run again at the latest (monotonic ns), though nothing came in."""
        return self._pauses[0][0] if self._pauses else NEVER_NS

    def _go_on(self, running: Running, value: Any, error: DanubeError | None) -> None:
        try:
            step = running.task.throw(error) if error is not None else running.task.send(value)
        except StopIteration as end:
            self._end(running, end.value, None)
        except DanubeError as fault:
            self._end(running, None, fault)
        except Exception as fault:  # a fault of one task must not end the others
            _log.exception("a task failed")
            self._end(running, None, Internal(f"{fault!r}; see the broker's log"))
        else:
            self._take(running, step)

    def _take(self, running: Running, step: Step) -> None:
        if isinstance(step, Do):
            work = _Work(step.work, running)
            self._work.append(work)
            self._start_work(work.run, is_gentle=step.is_gentle)
        elif isinstance(step, Ask):

            def answered(reply: Reply) -> None:
                self._ready.append((running, reply.value, reply.error))

            self._mailbox.call(
                step.peer, step.message, on_reply=answered, timeout_ms=step.timeout_ms
            )
        elif isinstance(step, Pause):
            self._count += 1
            due_ns = self._clock.monotonic_ns() + step.ns
            heapq.heappush(self._pauses, (due_ns, self._count, running))
        elif isinstance(step, Fork):
            self._ready.append((running, self.start(step.task), None))
        elif step.running.is_over:
            self._ready.append((running, step.running.result, step.running.error))
        else:
            step.running.joined.append(running)

    def _end(self, running: Running, result: Any, error: DanubeError | None) -> None:
        running.is_over, running.result, running.error = True, result, error
        for waiting in running.joined:
            self._ready.append((waiting, result, error))
