"""Messages that kernels have begun to receive from the ROUTER and leave to Python: up to three parts, the rest still waits.

    IN_HAND   1 sender    2 and command    3 and body

A sender alone is one whose command Python receives, with what the peer has proved (`JobWord.PROVES`).
"""

from __future__ import annotations

from typing import Any

from danube_fast.errors import Internal
from danube_fast.frame.kernel import address_of
from danube_fast.net.port import take_rest
from danube_fast.net.port_kernels import FUNCTIONS, SIZE_MASK
from danube_fast.workers.shard.publish.turn_layout import (
    AT_COMMAND,
    AT_COMMAND_MESSAGE,
    AT_SENDER,
    COMMAND_ROOM,
    JOB,
    LEFT_PLACE,
    NOT_RECEIVED,
)

__all__ = ["take_in_hand"]

_WHOLE = 3


def take_in_hand(
    words: memoryview[int], received: bytearray, holders: list[bytes | None]
) -> tuple[bytes, memoryview | None, list[Any], bool]:
    """Take the message in hand out of a job: sender, command, parts behind it, whether more follow; command None: it is
    the first of those. Raises Internal, MemoryError."""
    sender_bytes = words[JOB.SENDER_FOUND] & SIZE_MASK
    identity = bytes(received[AT_SENDER : AT_SENDER + sender_bytes])
    found = words[JOB.COMMAND_FOUND]
    if found == NOT_RECEIVED:
        return identity, None, [], True
    if found < 0:
        raise Internal("ZeroMQ gave the first part of a message without the second one")
    size = found & SIZE_MASK
    command = received[AT_COMMAND : AT_COMMAND + size]
    if size > COMMAND_ROOM:
        command = bytearray(size)
        message = words[JOB.MESSAGE] + AT_COMMAND_MESSAGE
        take_rest(FUNCTIONS, message, address_of(command), size)
    parts: list[Any] = []
    if words[JOB.IN_HAND] == _WHOLE:
        found = words[JOB.BODY_FOUND]
        body, holders[LEFT_PLACE] = holders[LEFT_PLACE], None
        if body is None:
            raise MemoryError(f"no memory for a bundle of {found & SIZE_MASK} bytes")
        parts = [body]
    return identity, memoryview(command), parts, found > SIZE_MASK
