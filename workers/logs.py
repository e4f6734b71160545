"""How every process of the broker logs: one line each on stderr, with its role; text or JSON."""

from __future__ import annotations

import logging
import sys

import msgspec

__all__ = ["configure"]


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": self._process,
            "text": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(process: str, log_format: str) -> None:
    """Send this process's log to stderr. `process` is its role and index."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter(process))
    else:
        template = f"%(asctime)s %(levelname)s {process}: %(message)s"
        handler.setFormatter(logging.Formatter(template))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
