"""The words of a broker for the person who started it: the ready line on stdout, all else on stderr."""

from __future__ import annotations

import os
from typing import TextIO

import msgspec

from danube_fast.errors import DanubeError, failure_line
from danube_fast.ring.counters import Counter
from danube_fast.types import AUTH_NONE_TEXT
from danube_fast.workers.process.layout import BOOTSTRAP_KEY
from danube_fast.workers.supervisor.spawn import Shared

__all__ = ["Output", "auth_text"]


class Output:
    """Write the ready line on stdout, all else on stderr."""

    def __init__(self, output: str, stream: TextIO, errors: TextIO) -> None:
        self.is_json = output == "json"
        self._stream, self._errors = stream, errors

    def note(self, text: str) -> None:
        """Write one line for the person who started the broker."""
        line = msgspec.json.encode({"event": "note", "text": text}).decode()
        print(line if self.is_json else f"danube-fast: {text}", file=self._errors, flush=True)

    def error(self, error: DanubeError) -> None:
        """Write the error that ends the broker."""
        line = failure_line(type(error).__name__, str(error))
        text = line if self.is_json else f"danube-fast: error: {error}"
        print(text, file=self._errors, flush=True)

    def ready(self, shared: Shared, coordinator_pid: int, worker_pids: list[int]) -> None:
        """Write the ready line."""
        addresses = shared.addresses
        worker_ports = [addresses.ports[process] for process in shared.processes.workers]
        event = {
            "event": "ready",
            "url": addresses.url,
            "admin": addresses.admin_url,
            "workers": len(worker_pids),
            "pid": os.getpid(),
            "worker_pids": worker_pids,
            "coordinator_pid": coordinator_pid,
            "worker_ports": worker_ports,
            "data_dir": str(shared.directory.path),
            "auth": shared.settings.auth,
            "server_key": shared.server_key,
            "certificate": shared.certificate,
            "sign_on": addresses.sign_on_url,
            "server_keys": shared.server_keys,
        }
        if self.is_json:
            text = msgspec.json.encode(event).decode()
        else:
            ports = ", ".join(str(port) for port in worker_ports)
            pinned = f"; certificate {shared.certificate}" if shared.certificate else ""
            sign_on = f"  sign-on  {addresses.sign_on_url}\n" if addresses.sign_on_url else ""
            text = (
                f"danube-fast is ready at {addresses.url}\n"
                f"  admin    {addresses.admin_url}{pinned}\n"
                f"  workers  {len(worker_pids)} on ports {ports}\n"
                f"  data     {shared.directory.path}, {len(shared.logs)} logs\n"
                f"  auth     {auth_text(shared)}\n"
                f"{sign_on}"
                f"  pid      {os.getpid()}; Ctrl-C stops it in order"
            )
        print(text, file=self._stream, flush=True)


def auth_text(shared: Shared) -> str:
    """Say who may come in."""
    if shared.settings.auth == "none":
        return AUTH_NONE_TEXT
    text = f"required; server key {shared.server_key}"
    for other in shared.server_keys:
        if other != shared.server_key:
            text += f"\n           and {other}, while it is rotated: clients pin both"
    if shared.counters.total(Counter.FIRST_KEYS):
        first = shared.directory.path / BOOTSTRAP_KEY
        text += f"\n           first administrator: {first}, until its first use"
    return text
