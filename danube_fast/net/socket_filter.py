"""Filters of sockets: programs of classic BPF, which need no rights, that say what the kernel hands over."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Collection, Sequence

__all__ = ["attach", "detach", "ended_on_port", "sources_filter"]

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_INSTRUCTION = struct.Struct("=HBBI")
_PROGRAM = struct.Struct("@HP")
"""struct sock_filter and struct sock_fprog of Linux."""
_NETWORK = 0xFFF00000
"""Where the kernel's filters see the header of IP begin (SKF_NET_OFF)."""
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _AND, _IF_EQUAL, _JUMP, _RETURN = (
    0x20, 0x28, 0x30, 0x54, 0x15, 0x05, 0x06,
)  # fmt: skip
_AT_VERSION, _AT_IPV4_SOURCE, _AT_IPV6_SOURCE = 0, 12, 8
_AT_PORT = 20
"""Of what sock_diag tells: the local port, behind the header of netlink and four bytes."""
_WHOLE_PACKET = 0xFFFFFFFF

Instruction = tuple[int, int, int, int]
"""Code, jumps if true and if not, operand: struct sock_filter."""


def sources_filter(sources: Collection[bytes]) -> list[Instruction]:
    """Write the filter that drops packets from these sources: IPv4 addresses, and networks of IPv6."""
    fours: list[Instruction] = []
    sixes: list[Instruction] = []
    for source in sources:
        words = [int.from_bytes(source[at : at + 4], "big") for at in range(0, len(source), 4)]
        if len(words) == 1:
            fours += [(_IF_EQUAL, 0, 1, words[0]), (_RETURN, 0, 0, 0)]
        else:
            sixes += [
                (_LOAD_WORD, 0, 0, _NETWORK + _AT_IPV6_SOURCE), (_IF_EQUAL, 0, 3, words[0]),
                (_LOAD_WORD, 0, 0, _NETWORK + _AT_IPV6_SOURCE + 4), (_IF_EQUAL, 0, 1, words[1]),
                (_RETURN, 0, 0, 0),
            ]  # fmt: skip
    accept = (_RETURN, 0, 0, _WHOLE_PACKET)
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK + _AT_VERSION), (_AND, 0, 0, 0xF0), (_IF_EQUAL, 0, 1, 0x60),
        (_JUMP, 0, 0, len(fours) + 2), (_LOAD_WORD, 0, 0, _NETWORK + _AT_IPV4_SOURCE),
        *fours, accept, *sixes, accept,
    ]  # fmt: skip


def ended_on_port(port: int) -> list[Instruction]:
    """Write the filter that passes what sock_diag tells of sockets with this local port, and nothing else."""
    return [
        (_LOAD_HALF, 0, 0, _AT_PORT), (_IF_EQUAL, 0, 1, port), (_RETURN, 0, 0, _WHOLE_PACKET), (_RETURN, 0, 0, 0),
    ]  # fmt: skip


def attach(owner: socket.socket, instructions: Sequence[Instruction]) -> None:
    """Have a socket use a filter, instead of the one before. Raises OSError."""
    room = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*each) for each in instructions))
    told = _PROGRAM.pack(len(instructions), ctypes.addressof(room))
    owner.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)


def detach(owner: socket.socket) -> None:
    """Have a socket use no filter. Raises OSError."""
    try:
        owner.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
