"""Shared memory between the processes of one host: rings, doorbells, counters, liveness.

Only what needs no kernels is re-exported, because the supervisor imports no numba. `SpscRing` is in
`ring.spsc`, `Doorbell` in `ring.doorbell`.
"""

from danube_fast.ring.control import ControlBlock, ProcessState, ProcessStatus
from danube_fast.ring.counters import Counter, CounterBlock, CounterKind
from danube_fast.ring.layout import ring_bytes
from danube_fast.ring.memory import create_eventfd, create_memfd, format_ring, map_fd

__all__ = [
    "ControlBlock",
    "Counter",
    "CounterBlock",
    "CounterKind",
    "ProcessState",
    "ProcessStatus",
    "create_eventfd",
    "create_memfd",
    "format_ring",
    "map_fd",
    "ring_bytes",
]
