"""What the workloads of one invocation share: a folder, a broker, payloads, names of topics."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from danube_fast.bench.load import host
from danube_fast.bench.load.payloads import create_payloads
from danube_fast.bench.load.processes import Broker, Crew, Usage
from danube_fast.bench.plan import Figures, Plan, client_of
from danube_fast.errors import FailedPrecondition

__all__ = ["WORKERS", "Rig", "blank", "charge"]

WORKERS = 2
_runs = itertools.count(1)
"""Of the whole process: two rigs may use one broker."""


class Rig:
    """A context manager: at its end no process and no file is left."""

    def __init__(self, url: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="danube-fast-bench-"))
        self.url = url
        self._broker: Broker | None = None
        self._payloads: tuple[int, int, int] = (0, 0, -1)
        self._on_terminate: Any = None
        """What SIGTERM did before."""

    def broker(self, plan: Plan | None = None) -> Broker:
        """The broker of the workloads that share one: the given one, or `serve --workers 2` with the
        settings that the plan asks for."""
        settings = {} if plan is None else plan.settings
        if self._broker is not None and plan is not None and self._broker.settings != settings:
            self.drop_broker()
        if self._broker is None:
            self._broker = Broker(self.folder, WORKERS, self.url, settings)
        return self._broker

    def drop_broker(self) -> None:
        """End the shared broker with its data; the next workload gets a fresh one."""
        if self._broker is not None:
            broker, self._broker = self._broker, None
            broker.stop()
            if self.url is None:
                shutil.rmtree(broker.data_dir, ignore_errors=True)

    def leave_broker(self, what: str) -> None:
        """End the shared broker for `what`, which needs its own. Raises FailedPrecondition if another one
        was given."""
        if self.url is not None:
            raise FailedPrecondition(
                f"{what} starts and stops brokers of its own; run it without --url"
            )
        self.drop_broker()

    @contextlib.contextmanager
    def own_broker(
        self, what: str, workers: int = WORKERS, settings: Mapping[str, Any] | None = None
    ) -> Iterator[Broker]:
        """A broker for one run alone, with `settings` other than the defaults. Raises FailedPrecondition if another one was given."""
        self.leave_broker(what)
        folder = Path(tempfile.mkdtemp(prefix="broker-", dir=self.folder))
        try:
            broker = Broker(folder, workers, settings=settings)
            try:
                yield broker
            finally:
                broker.stop()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """An empty directory where processes that are started meanwhile put their temporary files."""
        folder = Path(tempfile.mkdtemp(prefix="t-", dir=self.folder))
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(folder)
        try:
            yield folder
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before
            shutil.rmtree(folder, ignore_errors=True)

    def payloads(self, count: int, message_bytes: int) -> int:
        """Descriptor of prepared messages; kept for the next run of the same size."""
        if self._payloads[:2] != (count, message_bytes):
            self._close_payloads()
            self._payloads = (count, message_bytes, create_payloads(count, message_bytes))
        return self._payloads[2]

    def _close_payloads(self) -> None:
        if self._payloads[2] >= 0:
            os.close(self._payloads[2])
            self._payloads = (0, 0, -1)

    def topics(self, count: int) -> list[str]:
        """Names that no run has used before."""
        run = f"/default/bench-{os.getpid()}-{next(_runs)}"
        return [f"{run}-{index}" for index in range(count)]

    def crew(self) -> Crew:
        """For the members of a run."""
        return Crew(self.folder)

    def close(self) -> None:
        """End everything."""
        try:
            self.drop_broker()
        finally:
            self._close_payloads()
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Rig:
        if threading.current_thread() is threading.main_thread():
            self._on_terminate = signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            if self._on_terminate is not None:
                signal.signal(signal.SIGTERM, self._on_terminate)


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM ends a run as Ctrl-C does: with nothing left behind."""
    raise KeyboardInterrupt


def charge(figures: Figures, broker: Broker, before: Usage) -> Figures:
    """Fill in what a run has cost the broker since `before`."""
    cpu_seconds = host.cpu_seconds(broker.pids) - before.cpu_seconds
    if broker.pids:
        figures.broker_cpu_s = cpu_seconds
        figures.broker_rss_mb = broker.resident_mb()
    after = broker.settled_usage(before.messages + (figures.messages or 0))
    figures.syncs = after.syncs - before.syncs
    if figures.syncs:
        figures.bytes_per_sync = (after.written_bytes - before.written_bytes) / figures.syncs
    return figures


def blank(plan: Plan) -> Figures:
    """Figures with what the plan says."""
    return Figures(
        workload=plan.workload,
        transport=plan.transport,
        durability=plan.durability,
        message_bytes=plan.message_bytes,
        messages=plan.messages,
        rate=plan.rate or None,
        client=client_of(plan.workload),
    )
