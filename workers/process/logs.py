"""How every process of the broker logs: one line each on stderr, with its role; text or JSON.

A line that comes a thousand times a second is written a few times, then once a second with the number of
lines that were left out: a fault must not fill the disk with its own description.
"""

from __future__ import annotations

import logging
import sys

import msgspec

__all__ = ["LinesPerCause", "configure"]

BURST_LINES = 10
CAUSES_MAX = 1000


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Format a line as one JSON object."""
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": self._process,
            "text": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class LinesPerCause(logging.Filter):
    """Let `BURST_LINES` lines of one cause through and then one a second, which counts the others.

    Lines have one cause if their logger, level and text before its values are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._causes: dict[tuple[str, int, str], list[float]] = {}
        """Cause -> lines it may still write, when that was so, lines left out since the last one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide whether a line is written; the first after a gap says how many were not."""
        cause = record.name, record.levelno, str(record.msg)
        known = self._causes.get(cause)
        if known is None:
            if len(self._causes) >= CAUSES_MAX:
                self._causes.clear()
            known = self._causes[cause] = [BURST_LINES, record.created, 0]
        allowed = min(known[0] + max(record.created - known[1], 0), BURST_LINES)
        known[1] = record.created
        if allowed < 1:
            known[0] = allowed
            known[2] += 1
            return False
        known[0] = allowed - 1
        if known[2]:
            record.msg = f"{record.getMessage()} (and {known[2]:.0f} lines like this one left out)"
            record.args = None
            known[2] = 0
        return True


def configure(process: str, log_format: str) -> None:
    """Send this process's log to stderr. `process` is its role and index."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s")
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else text)
    handler.addFilter(LinesPerCause())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
