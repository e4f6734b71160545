"""A process of a fork server that ends when a pipe does."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Argument: the pipe's descriptor."""
    os.read(int(sys.argv[1]), 1)
    return 0
