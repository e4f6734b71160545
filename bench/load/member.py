"""One producer or consumer of a run, a process of its own: `python -m danube_fast.bench.load.member FD`.

The first order names a function, `role(link, options)`, that does the rest. When the harness goes,
so does the member: reading the next order ends it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from danube_fast.errors import DanubeError, Internal

__all__ = ["Link", "main"]


class Link:
    """To the harness and back."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, what: Any) -> None:
        """Report."""
        self._pipe.send(what)

    def hear(self) -> Any:
        """Wait for the next order."""
        return self._pipe.recv()

    def has_order(self) -> bool:
        """Whether an order waits."""
        return self._pipe.poll()

    def ready(self) -> None:
        """Say that all is prepared, and wait for the go; what was prepared is no garbage."""
        gc.collect()
        gc.freeze()
        self.say("ready")
        self.hear()


def main() -> int:
    """Do what the harness orders; the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe = Connection(int(sys.argv[1]))
    link = Link(pipe)
    try:
        role, options = link.hear()
        module, _, function = role.partition(":")
        getattr(importlib.import_module(module), function)(link, options)
    except EOFError:
        os._exit(1)  # the harness has given up; nobody waits for an orderly end
    except DanubeError as error:
        link.say(_portable(error))
        return 1
    return 0


def _portable(error: DanubeError) -> DanubeError:
    """The error with nothing but its text, as it goes through a pipe."""
    try:
        return type(error)(str(error))
    except TypeError:
        return Internal(str(error))


if __name__ == "__main__":
    sys.exit(main())
