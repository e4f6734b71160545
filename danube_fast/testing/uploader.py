"""The shipped uploader on a simulated host, without its process; and a store that outlives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from danube_fast.clock import MILLISECOND_NS, Clock
from danube_fast.history.stores.store import ObjectStore
from danube_fast.testing.faulty_store import FaultyStore
from danube_fast.testing.loopback import Tap
from danube_fast.testing.process import Machine, Process, SimulatedEnvironment
from danube_fast.wal.background import Background, StartWork
from danube_fast.workers.uploader.uploader import Uploader

__all__ = ["SimulatedUploader"]

FAULT_OF_OURS = "see the broker's log"
"""Ends the text of an error that no code foresees."""
TURNS_WITHOUT_END = 20_000
"""An uploader that says so often in a row that there is more to do spins."""


class _Threads(Background):
    """Work of one life of an uploader: it is done when the seed says so, unless the process has ended before. What
    such a process had sent already is among the faults of the store."""

    def __init__(self, process: SimulatedUploader) -> None:
        self._process, self._epoch = process, process.epoch

    def make_fetch(self, wake_fd: int) -> StartWork:
        """Return what starts work that ends when the seed says so."""
        process = self._process

        def start(work: Callable[[], None], *, is_gentle: bool = False) -> None:
            def end() -> None:
                if process.is_up and process.epoch == self._epoch:
                    work()
                    process.wake()

            process.host.schedule.call(process.store.delay_ns(), end)

        return start


class _Environment(SimulatedEnvironment):
    """Threads, chance and store of one life of an uploader."""

    def __init__(self, process: SimulatedUploader) -> None:
        super().__init__(process, Tap())
        self.background: Background = _Threads(process)
        self._store = process.store

    def open_history(self, url: str, clock: Clock, scratch: Path) -> ObjectStore:
        """Open the one store that there is."""
        return self._store


class SimulatedUploader(Process):
    """The uploader over its lives."""

    def __init__(self, host: Machine, index: int, store: FaultyStore) -> None:
        super().__init__(host, index)
        self.store = store
        self.uploader: Uploader | None = None
        self.stalled_until_ns = 0
        """It stands still until then, as under SIGSTOP."""
        self._turns_in_a_row = 0

    def start(self) -> None:
        """Begin a new life over the same store."""
        host = self.host
        self.epoch += 1
        self._turn_ns = -1
        self.mailbox = self.make_mailbox()
        config = SimpleNamespace(data_dir=str(host.directory), processes=host.roles)
        boot: Any = SimpleNamespace(
            config=config, settings=host.settings, clock=host.clock, mailbox=self.mailbox,
            counters=SimpleNamespace(set=lambda *_: None, add=lambda *_: None),
            heartbeat=lambda: None, set_state=lambda state, port=0: None, stop_requested=False,
        )  # fmt: skip
        self.is_up = True
        self.uploader = Uploader(boot, _Environment(self))
        self.uploader.start()
        host.trace.note(f"uploader: started, epoch {self.epoch}")
        self.wake()

    def kill(self) -> None:
        """End as by SIGKILL."""
        self.is_up = False
        self.uploader = None
        self.host.trace.note("uploader: killed")

    def turn(self) -> None:
        """Do one turn. Raises RuntimeError if it spins, or has met an error that no code foresees."""
        uploader = self.uploader
        if uploader is None:
            return
        stalled_ns = self.stalled_until_ns - self.host.clock.now_ns
        if stalled_ns > 0:
            self.turn_in(stalled_ns)
            return
        work = uploader.do_work()
        if FAULT_OF_OURS in uploader.state.fault:
            raise RuntimeError(f"uploader: {uploader.state.fault}")
        self._turns_in_a_row = self._turns_in_a_row + 1 if work else 0
        if self._turns_in_a_row > TURNS_WITHOUT_END:
            raise RuntimeError("the uploader spins without an end")
        if work:
            self.wake()
            return
        self.turn_in(max(1, uploader.sleep_ms()) * MILLISECOND_NS)
        if not self.mailbox.prepare_sleep():
            self.wake()
