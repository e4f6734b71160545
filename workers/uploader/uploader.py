"""The uploader: sends closed history of all workers to the object store, and fetches it back for them.

    workers --runs--> rounds.py --objects, manifests--> store
            <--frontiers--'
            --offset--> fetches.py <--blocks--- store
            <--file of this host--'

One loop in one thread drives tasks; store and disk are used by threads beside it. No client talks to it, and
nothing waits for it but reads of history: its death delays those, and the trimming of logs.
"""

from __future__ import annotations

import logging
import random
import sys
from functools import partial

from danube_fast.broker import messages as m
from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.errors import DanubeError, Internal
from danube_fast.frame.crc import crc32c
from danube_fast.history.epochs import check_owner, claim_epoch
from danube_fast.history.stores.probe import probe_store
from danube_fast.ring.control import ProcessState
from danube_fast.ring.counters import Counter
from danube_fast.roles import COORDINATOR
from danube_fast.workers.process.boot import Boot, boot
from danube_fast.workers.process.environment import Environment
from danube_fast.workers.process.idle import IdleStrategy
from danube_fast.workers.process.tasks import Ask, Do, Pause, Task, Tasks
from danube_fast.workers.uploader.abandoned import sweep
from danube_fast.workers.uploader.checkpoint import Checkpoints
from danube_fast.workers.uploader.counted_store import CountedStore
from danube_fast.workers.uploader.fetches import Fetches
from danube_fast.workers.uploader.flushes import Flushes
from danube_fast.workers.uploader.rounds import Rounds
from danube_fast.workers.uploader.state import SCRATCH_NAME, UploaderState
from danube_fast.workers.uploader.sweep import Sweep

__all__ = ["Uploader", "main"]

_log = logging.getLogger(__name__)

IDLE_POLL_MS = 1000
LOOK_NS = SECOND_NS
"""How often workers are asked for what is due."""
RETRY_NS = SECOND_NS
RETRY_NS_MAX = 60 * SECOND_NS
"""Pauses after failures, which double."""


class Uploader:
    """The uploader without its process: `do_work` can be driven by a test."""

    def __init__(self, booted: Boot, environment: Environment | None = None) -> None:
        self._environment = environment or Environment()
        self._boot = booted
        mailbox = booted.mailbox
        start_work = self._environment.background.make_fetch(mailbox.fileno())
        self._tasks = Tasks(mailbox, start_work, booted.clock)
        self.state = UploaderState(booted, self._tasks)
        self._checkpoints = Checkpoints(self.state.data_dir)
        self._rounds = Rounds(self.state, self._checkpoints)
        self._fetches = Fetches(self.state)
        self._sweep = Sweep(self.state)
        self._flushes = Flushes(self.state, self._rounds)
        self._draw = random.Random(self._environment.new_token())
        self._token = b""
        """Tells its epoch from that of an uploader of an older copy."""
        self._given: m.Uploader | None = None
        """What the coordinator has given it."""

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Report READY, and begin."""
        self._idle = IdleStrategy([], lambda: False, self._boot.mailbox, self._boot.clock)
        working = self._tasks.start(self._work())
        self._rounds.wake = lambda: self._tasks.wake(working)
        self._endless = [working, self._tasks.start(self._sweep.run())]
        self._boot.set_state(ProcessState.READY)

    def run(self) -> None:
        """Run the loop until a stop is requested."""
        while not self._boot.stop_requested:
            if not self.do_work():
                self._idle.sleep(self.sleep_ms())
        self._boot.set_state(ProcessState.STOPPED)

    def do_work(self) -> int:
        """Do one bounded turn; the number of things done. Raises Internal when it cannot go on."""
        now_ns = self._boot.clock.monotonic_ns()
        self._boot.heartbeat()
        done = self._boot.mailbox.do_work(now_ns) + self._tasks.do_work(now_ns)
        for task in self._endless:
            if task.is_over:
                raise Internal(f"the uploader starts anew: {task.error}")
        return done

    def sleep_ms(self) -> int:
        """How long to sleep, unless a process or a thread wakes the loop."""
        waiting = self._boot.mailbox.next_deadline_ns(), self._tasks.next_deadline_ns()
        left_ms = (min(waiting) - self._boot.clock.monotonic_ns()) // MILLISECOND_NS + 1
        return int(max(min(left_ms, IDLE_POLL_MS), 0))

    # ------------------------------------------------------------ work

    def _work(self) -> Task:
        """Begin, then upload whatever is due, until the process ends."""
        pause_ns = RETRY_NS
        while True:
            try:
                if not self.state.epoch:
                    yield from self._begin()
                uploaded = yield from self._rounds.round()
            except DanubeError as error:
                self.state.note_fault(error)
                yield Pause(int(pause_ns * self._draw.uniform(0.5, 1)))
                pause_ns = min(2 * pause_ns, RETRY_NS_MAX)
                self._boot.counters.add(Counter.HISTORY_ROUND_RETRIES)
                continue
            pause_ns = RETRY_NS
            self.state.note_fault(self._rounds.fault)
            if not uploaded:
                yield Pause(LOOK_NS)

    def _begin(self) -> Task:
        """Take an epoch, tell all workers of it, and prove the store. A second try has the same epoch: one that no
        uploader claims would hide later ones from an older copy of the data."""
        given = self._given
        if given is None:
            given = self._given = yield Ask(COORDINATOR, m.BeginUploader())
        for worker in self._boot.config.processes.workers:  # they hear of what went wrong last, too
            yield Ask(worker, m.ListBacklogs(given.epoch, self.state.fault))
        store: CountedStore = yield Do(partial(self._open, given.identity))
        self._token = self._token or self._environment.new_token()
        claim = partial(claim_epoch, store, given.epoch, self._token)
        is_mine: bool = yield Do(claim)
        if not is_mine:
            yield Ask(COORDINATOR, m.NoteOlderCopy(self._boot.settings.store, given.epoch))
        self.state.is_older_copy = given.is_older_copy or not is_mine
        yield Do(self._checkpoints.load)
        if self._checkpoints.current is not None:
            # manifests may not name it yet, and it is deleted under none of them before they do
            self.state.writing.add(self._checkpoints.current.key)
        self.state.begin(given.identity, given.epoch, store)
        self._tasks.start(sweep(self.state, self._checkpoints))

    def _open(self, identity: bytes) -> CountedStore:
        url, clock = self._boot.settings.store, self._boot.clock
        # parts that wait there belong to that store alone
        scratch = self.state.data_dir / SCRATCH_NAME / f"{crc32c(url.encode()):08x}"
        opened = self._environment.open_history(url, clock, scratch)
        store = CountedStore(opened, self._boot.counters)
        check_owner(store, identity)
        probe_store(store, self._environment.new_token())
        return store


def main() -> int:
    """Run as `python -m danube_fast.workers.uploader.uploader --boot-fd N`; the exit code."""
    booted = boot()

    def run() -> None:
        uploader = Uploader(booted)
        uploader.start()
        uploader.run()

    return booted.exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main())
