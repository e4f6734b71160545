"""The display of a running demo: bars on a terminal, a plain line a second elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from danube_fast.clock import SystemClock

__all__ = ["View"]

PLAIN_INTERVAL_NS = 1_000_000_000
BAR_COLUMNS = 30


class View:
    """Lines about what happens, and how far each party is. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = SystemClock()
        self._began_ns = self._clock.monotonic_ns()
        self._shown_ns = 0
        self._shown_text = ""
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    @property
    def seconds(self) -> float:
        """Since the start."""
        return (self._clock.monotonic_ns() - self._began_ns) / 1e9

    def say(self, text: str, style: str = "") -> None:
        """Something happened."""
        line = Text(f"{self.seconds:6.1f} s  {text}", style=style)
        self._console.print(line, soft_wrap=True)

    def show(self, done: dict[str, int], total: int) -> None:
        """How many of `total` messages each party has, by its name; call as often as you like."""
        if self._console.is_terminal:
            self._show_bars(done, total)
            return
        now_ns = self._clock.monotonic_ns()
        text = ", ".join(f"{name} {count:,}" for name, count in done.items())
        if now_ns - self._shown_ns >= PLAIN_INTERVAL_NS and text != self._shown_text:
            self._shown_ns, self._shown_text = now_ns, text
            self.say(f"{text} of {total:,}")

    def _show_bars(self, done: dict[str, int], total: int) -> None:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(BAR_COLUMNS),
                TextColumn("{task.completed:,} of {task.total:,}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bars.start()
        for name, count in done.items():
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=total)
            self._bars.update(self._tasks[name], completed=count)

    def rest(self) -> None:
        """Leave the bars as they are; nothing moves any more."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.rest()
