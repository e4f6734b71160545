"""A PUBLISHED or PONG as kernels read it: the answers to requests with rows go to their rows, without Python."""

from __future__ import annotations

from danube_fast.client.link.answers import answer, find_row
from danube_fast.errors import Status
from danube_fast.frame.kernel import kernel
from danube_fast.frame.memory import load_i64, load_u8
from danube_fast.net.msgpack_kernel import EMPTY_MAP, FIXED_ARRAY, read_array, read_unsigned
from danube_fast.net.protocol import Pong, Published, op_code

__all__ = ["hand_over"]

_PONG, _PUBLISHED = op_code(Pong), op_code(Published)
_OK = int(Status.OK)
_DUPLICATE = int(Status.DUPLICATE)


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def _read_entry(answers: int, link: int, at: int, end: int, number: int, applies: int) -> int:
    """Read one entry of PUBLISHED, [request, [status, offset]], and hand it over if `applies`: where it ends, or 0 if
    it is for Python."""
    if at + 1 >= end or load_u8(at) != FIXED_ARRAY + 2:
        return 0
    at = read_unsigned(at + 1, end, number)
    if at == 0 or at >= end or load_u8(at) != FIXED_ARRAY + 2:
        return 0
    row = find_row(answers, link, load_i64(number))
    at = read_unsigned(at + 1, end, number)
    if row == 0 or at == 0:
        return 0
    status = load_i64(number)
    at = read_unsigned(at, end, number)
    if at == 0 or status > _DUPLICATE:
        return 0
    if applies != 0:
        answer(row, status, load_i64(number))
    return at


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def _read_published(answers: int, link: int, at: int, end: int, number: int, applies: int) -> int:
    """Read a command; 1 if it is a PUBLISHED that threads wait for, without texts."""
    if at + 2 > end or load_u8(at) != FIXED_ARRAY + 3 or load_u8(at + 1) != _PUBLISHED:
        return 0
    at = read_array(at + 2, end, number)
    if at == 0:
        return 0
    for _ in range(load_i64(number)):
        at = _read_entry(answers, link, at, end, number, applies)
        if at == 0:
            return 0
    return 1 if at + 1 == end and load_u8(at) == EMPTY_MAP else 0


@kernel("int64(int64,int64,int64,int64,int64)")
def _answer_pong(answers: int, link: int, at: int, end: int, number: int) -> int:
    """Answer the row of a heartbeat; 0 if the command is no PONG, or has none."""
    if at + 2 > end or load_u8(at) != FIXED_ARRAY + 2 or load_u8(at + 1) != _PONG:
        return 0
    if read_unsigned(at + 2, end, number) != end:
        return 0
    row = find_row(answers, link, load_i64(number))
    if row == 0:
        return 0
    answer(row, _OK, 0)
    return 1


@kernel("int64(int64,int64,int64,int64,int64)")
def hand_over(answers: int, link: int, at: int, end: int, number: int) -> int:
    """Answer the rows of a command that came over that link; 0 if it is for Python, and is to be there still.

    `number` is scratch for a word.
    """
    if _read_published(answers, link, at, end, number, 0) == 0:
        return _answer_pong(answers, link, at, end, number)
    # over rings a thread may take its row back meanwhile: Python reads that ack
    return _read_published(answers, link, at, end, number, 1)
