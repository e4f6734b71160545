"""Entry of the console script: loads the commands, so that Ctrl-C meanwhile ends it as it ends a command."""

from __future__ import annotations

import os

__all__ = ["run"]

EXIT_INTERRUPTED = 130


def run() -> None:
    """Load the commands, and run the one that was typed."""
    try:
        from danube_fast.cli import main

        main.run()
    except KeyboardInterrupt:
        # without the interpreter's end: a second Ctrl-C would be reported there
        os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    run()
