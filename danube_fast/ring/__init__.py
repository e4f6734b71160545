"""Shared memory between the processes of one host: rings, doorbells, counters, liveness.

Nothing is imported here: `control`, `counters`, `layout` and `memory` need no kernels, and the
supervisor, which reads them, must not load Numba.
"""
