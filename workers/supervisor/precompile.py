"""Builds the kernel image before any process needs it, and shows progress."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable

from danube_fast.children import child_environment
from danube_fast.clock import MILLISECOND_NS, Clock
from danube_fast.errors import Internal
from danube_fast.frame.image import Progress, build_command, is_built

__all__ = ["precompile"]

COMPILE_TIMEOUT_MS = 300_000
LINE_BYTES_MAX = 4096


def precompile(stop_fd: int, note: Callable[[str], None], clock: Clock) -> bool:
    """Compile all kernels unless that is done. False if `stop_fd` became readable meanwhile.

    Raises Internal if the child fails or takes far too long.
    """
    if is_built():
        return True
    with subprocess.Popen(
        build_command(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=child_environment(),
        process_group=0,
    ) as child:
        try:
            if not _follow(child, stop_fd, note, clock):
                return False
        finally:
            child.kill()
        code = child.wait()
    if code != 0:
        raise Internal(f"the kernels could not be compiled (exit code {code}); see the text above")
    return True


def _follow(
    child: subprocess.Popen[bytes], stop_fd: int, note: Callable[[str], None], clock: Clock
) -> bool:
    """Show progress until the child ends; False if a stop was asked for."""
    if child.stdout is None:
        raise Internal("the compile child has no output")
    began_ns = clock.monotonic_ns()
    progress = Progress(note)
    poller = select.poll()
    poller.register(stop_fd, select.POLLIN)
    poller.register(child.stdout, select.POLLIN)
    while True:
        waited_ms = (clock.monotonic_ns() - began_ns) // MILLISECOND_NS
        ready = dict(poller.poll(max(COMPILE_TIMEOUT_MS - waited_ms, 0)))
        if stop_fd in ready:
            return False
        if not ready:
            raise Internal("compiling the kernels took over 5 minutes; is this host overloaded?")
        text = os.read(child.stdout.fileno(), LINE_BYTES_MAX)
        if not text:
            progress.end()
            child.wait()
            return True
        if text.strip():
            progress.show(text.decode().splitlines()[-1])
