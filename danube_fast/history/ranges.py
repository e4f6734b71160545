"""Ranges of offsets, each with its first offset and the one behind its last: sets of offsets, as lists in order."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Range", "common", "subtract", "united"]

Range = tuple[int, int]


def united(ranges: Iterable[Range]) -> list[Range]:
    """Put ranges in order, those that meet as one; empty ones go."""
    found: list[Range] = []
    for base, end in sorted(ranges):
        if end <= base:
            continue
        if found and base <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((base, end))
    return found


def subtract(ranges: Iterable[Range], gone: Iterable[Range]) -> list[Range]:
    """Take `gone` out of `ranges`."""
    left = united(ranges)
    for base, end in united(gone):
        left = [
            part
            for low, high in left
            for part in ((low, min(high, base)), (max(low, end), high))
            if part[0] < part[1]
        ]
    return left


def common(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """Find the offsets that are in both."""
    ours = united(ranges)
    return subtract(ours, subtract(ours, others))
