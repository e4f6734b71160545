"""Faults of a process of a broker, from its counters: what it does without just now, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping

from danube_fast.ring.counters import Counter
from danube_fast.ring.handover import address_beside
from danube_fast.security.question_threads import ANSWER_SECONDS

__all__ = ["taken_text", "threads_text"]


def taken_text(process: str, ipc_endpoint: str, counts: Mapping[Counter, int]) -> str:
    """Say which names another process has that are of this one, and which ways in are missing; empty: none."""
    names, ways = [], []
    if counts[Counter.IPC_TAKEN]:
        names.append(ipc_endpoint.removeprefix("ipc://"))
        ways.append("no ipc")
    if counts[Counter.RINGS_TAKEN]:
        names.append("@" + address_beside(ipc_endpoint)[1:].decode())
        ways.append("no shared memory")
    if not names:
        return ""
    return (
        f"another process has the abstract socket {_plural('name', names)} {' and '.join(names)}, so {process} has "
        f"{' and '.join(ways)}, and clients come in by other ways: end that process (as root, `ss -xlp` names it), and "
        f"{process} takes the {_plural('name', names)} again within seconds"
    )


def threads_text(component: str, counts: Mapping[Counter, int]) -> str:
    """Say how many threads the component of another package does not answer; empty: none."""
    lost = counts[Counter.THREADS_LOST]
    if not lost:
        return ""
    whose = "secrets of addresses" if component == "authenticator" else "questions about users"
    return (
        f"{lost} {'thread has' if lost == 1 else 'threads have'} waited for the {component} for more than "
        f"{ANSWER_SECONDS:g} s: repair what it waits for; {whose} that it does not answer are refused meanwhile"
    )


def _plural(word: str, names: list[str]) -> str:
    return word if len(names) == 1 else f"{word}s"
