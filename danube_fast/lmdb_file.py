"""Whether an LMDB file is what LMDB wrote: looked at before LMDB maps it.

LMDB has no checksums and believes its pages: one flipped byte can end the process (a wild pointer, a
file that ends too early under its map) or give a wrong answer. So a file that was closed, or left by
a kill, is walked once before it is opened:

    meta page 0 or 1, the newer --> free list    no page in it is used elsewhere
                               `--> main --> named databases --> branch pages --> leaf pages

Every page is where its number says, is used once, holds nodes that end inside it and keys in order,
and the counts that LMDB keeps are right. What values hold is the affair of their writers.
One process at a time has such a file open, so it does not change meanwhile.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from danube_fast.errors import DataLoss
from danube_fast.frame.kernel import address_of, direct, kernel
from danube_fast.frame.memory import (
    load_i64,
    load_u16,
    load_u32,
    memory_compare,
    store_u64,
)

__all__ = ["check_lmdb_file"]

PAGE_BYTES = 4096
PAGE_HEADER_BYTES = 16
META_PAGES = 2
META_MAGIC = 0xBEEFC0DE
META_VERSION = 1
BRANCH, LEAF, OVERFLOW, META = 0x01, 0x02, 0x04, 0x08
NODE_HEADER_BYTES = 8
NODE_BIG, NODE_DATABASE = 0x01, 0x02
"""The value lies in pages of its own; the value is the root of a named database."""
FREE_LIST_FLAGS = 0x08
NO_PAGE = (1 << 64) - 1
DEPTH_MAX = 32
PAGES_MAX = 1 << 24
"""64 GiB: more than any file of ours."""
KEYS_PER_PAGE_MAX = PAGE_BYTES // (NODE_HEADER_BYTES + 2)

_PAGE = struct.Struct("<QHHHH")
_OVERFLOW_PAGE = struct.Struct("<QHHI")
_META = struct.Struct("<IIQQ")
_DATABASE = struct.Struct("<IHHQQQQQ")
_META_END = struct.Struct("<QQ")
_NODE = struct.Struct("<HHHH")
_PAGE_NUMBER = struct.Struct("<Q")

# Words of the state that goes from leaf to leaf.
STATE_KEY = 0  # address of the key before
STATE_KEY_BYTES = 1  # its length; -1: there is none
STATE_STRICT = 2  # 1: the next key must be greater; 0: it may be the same
STATE_INTEGER = 3  # 1: keys are 64-bit numbers
STATE_WORDS = 4
_WORD = 8
_LEAF = LEAF
_SPECIAL = NODE_BIG | NODE_DATABASE
_BIG = NODE_BIG


@kernel("int64(int64,int64,int64)")
def take_key(state: int, key: int, key_bytes: int) -> int:
    """1 if the key at `key` may come next; it is remembered. 0 if it is out of order."""
    before_bytes = load_i64(state + _WORD * STATE_KEY_BYTES)
    if before_bytes >= 0:
        before = load_i64(state + _WORD * STATE_KEY)
        if load_i64(state + _WORD * STATE_INTEGER) != 0:
            order = 1
            if key_bytes == before_bytes == _WORD:
                order = load_i64(before) - load_i64(key)
        else:
            order = memory_compare(before, key, min(before_bytes, key_bytes))
            if order == 0:
                order = before_bytes - key_bytes
        if order > 0 or (order == 0 and load_i64(state + _WORD * STATE_STRICT) != 0):
            return 0
    store_u64(state + _WORD * STATE_KEY, key)
    store_u64(state + _WORD * STATE_KEY_BYTES, key_bytes)
    store_u64(state + _WORD * STATE_STRICT, 1)
    return 1


@kernel("int64(int64,int64,int64,int64)")
def check_leaf(state: int, page: int, number: int, special: int) -> int:
    """The number of keys of the leaf at address `page`, -1 if it is no sound leaf.

    Offsets of nodes whose value is not plain go to `special` (room for KEYS_PER_PAGE_MAX + 1 int64);
    the first word is their count.
    """
    lower, upper = load_u16(page + 12), load_u16(page + 14)
    store_u64(special, 0)
    if load_i64(page) != number or load_u16(page + 10) != _LEAF or load_u16(page + 8) != 0:
        return -1
    if lower < PAGE_HEADER_BYTES or lower > upper or upper > PAGE_BYTES or lower & 1 != 0:
        return -1
    count = (lower - PAGE_HEADER_BYTES) >> 1
    for index in range(count):
        at = load_u16(page + PAGE_HEADER_BYTES + 2 * index)
        if at < upper or at + NODE_HEADER_BYTES > PAGE_BYTES:
            return -1
        flags, key_bytes = load_u16(page + at + 4), load_u16(page + at + 6)
        value_bytes = load_u32(page + at)
        if flags & ~_SPECIAL != 0 or flags == _SPECIAL:
            return -1
        end = at + NODE_HEADER_BYTES + key_bytes
        end += _WORD if flags & _BIG != 0 else value_bytes
        if end > PAGE_BYTES:
            return -1
        if take_key(state, page + at + NODE_HEADER_BYTES, key_bytes) == 0:
            return -1
        if flags != 0:
            found = load_i64(special) + 1
            store_u64(special, found)
            store_u64(special + _WORD * found, at)
    return count


_call_leaf = direct(check_leaf)
_call_key = direct(take_key)


class _Database(NamedTuple):
    """LMDB's record of one tree."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Meta(NamedTuple):
    free: _Database
    main: _Database
    last_page: int
    transaction: int


class _Counts:
    def __init__(self) -> None:
        self.branch_pages = self.leaf_pages = self.overflow_pages = self.entries = 0
        self.depth = 0


class _Walker:
    """One pass over one file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._address = address_of(data)
        self._special = np.zeros(KEYS_PER_PAGE_MAX + 1, dtype=np.int64)
        self._freed: list[int] = []
        meta = self._newest_meta()
        self._last_page = meta.last_page
        if meta.last_page >= PAGES_MAX:
            self._fail(0, f"page {meta.last_page} cannot be its last one")
        self._seen = np.zeros(meta.last_page + 1, dtype=np.uint8)
        self._seen[:META_PAGES] = 1
        self._tree(meta.main, named=True)
        self._tree(meta.free, free_list=True)
        for page in self._freed:
            if not META_PAGES <= page <= self._last_page or self._seen[page]:
                self._fail(page, "it is in use and in the list of free pages")
            self._seen[page] = 1

    def _fail(self, page: int, reason: str) -> NoReturn:
        raise DataLoss(f"{self._path} is damaged at byte {page * PAGE_BYTES}: {reason}")

    def _newest_meta(self) -> _Meta:
        metas = [self._meta(page) for page in range(META_PAGES)]
        numbers = [meta.transaction for meta in metas]
        # transaction n writes page n % 2; a new file has 0 in both
        if any(numbers) and (abs(numbers[0] - numbers[1]) != 1 or numbers[0] % META_PAGES):
            self._fail(0, f"transactions {numbers[0]} and {numbers[1]} cannot be its newest two")
        return max(metas, key=lambda meta: meta.transaction)

    def _meta(self, page: int) -> _Meta:
        at = page * PAGE_BYTES
        number, _, flags, _, _ = _PAGE.unpack_from(self._data, at)
        at += PAGE_HEADER_BYTES
        magic, version, _, _ = _META.unpack_from(self._data, at)
        at += _META.size
        free = _Database(*_DATABASE.unpack_from(self._data, at))
        main = _Database(*_DATABASE.unpack_from(self._data, at + _DATABASE.size))
        last_page, transaction = _META_END.unpack_from(self._data, at + 2 * _DATABASE.size)
        sound = (number, flags, magic, version) == (page, META, META_MAGIC, META_VERSION) and (
            free.pad,
            free.flags,
            main.pad,
            main.flags,
        ) == (PAGE_BYTES, FREE_LIST_FLAGS, 0, 0)
        if not sound:
            self._fail(page, "the page that describes the file makes no sense")
        return _Meta(free, main, last_page, transaction)

    def _use(self, page: int, count: int = 1) -> None:
        """Note pages that a tree holds, each of them for the first time."""
        if not META_PAGES <= page <= self._last_page - count + 1:
            self._fail(0, f"page {page} lies outside the file")
        # pages that were taken and freed in one change may be missing at the end of the file
        if (page + count) * PAGE_BYTES > len(self._data):
            self._fail(page, f"the file ends after {len(self._data)} bytes, before a page in use")
        if self._seen[page : page + count].any():
            self._fail(page, "it is used twice")
        self._seen[page : page + count] = 1

    def _tree(self, tree: _Database, *, named: bool = False, free_list: bool = False) -> None:
        counts = _Counts()
        inner: list[_Database] = []
        if tree.root != NO_PAGE:
            state = np.zeros(STATE_WORDS, dtype=np.int64)
            state[STATE_KEY_BYTES] = -1
            state[STATE_INTEGER] = int(free_list)
            self._page(tree.root, 1, tree.depth, state, counts, inner if named else None)
            if free_list:
                self._read_free_list(tree.root, tree.depth)
        told = (tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries)
        found = (counts.branch_pages, counts.leaf_pages, counts.overflow_pages, counts.entries)
        if told != found or (tree.root == NO_PAGE and tree.depth):
            self._fail(0, f"a tree has {found} pages and entries where {told} are told")
        for database in inner:
            if database.flags or database.pad:
                self._fail(0, "a named database has flags that it was not given")
            self._tree(database)

    def _page(
        self,
        page: int,
        level: int,
        depth: int,
        state: np.ndarray[Any, Any],
        counts: _Counts,
        inner: list[_Database] | None,
    ) -> None:
        """A page and all below it, in the order of the keys."""
        self._use(page)
        if not level <= depth <= DEPTH_MAX:
            self._fail(page, "the tree is deeper than is told")
        if level < depth:
            counts.branch_pages += 1
            for index, (child, key_at, key_bytes) in enumerate(self._branch(page)):
                if index:
                    if not _call_key(state.ctypes.data, self._address + key_at, key_bytes):
                        self._fail(page, "keys are out of order")
                    state[STATE_STRICT] = 0
                self._page(child, level + 1, depth, state, counts, inner)
            return
        counts.leaf_pages += 1
        address = self._address + page * PAGE_BYTES
        count = _call_leaf(state.ctypes.data, address, page, self._special.ctypes.data)
        if count < 0:
            self._fail(page, "the page is no sound leaf, or its keys are out of order")
        counts.entries += count
        for at in self._special[1 : 1 + int(self._special[0])].tolist():
            self._special_value(page, page * PAGE_BYTES + at, counts, inner)

    def _branch(self, page: int) -> list[tuple[int, int, int]]:
        """(child page, where its key is, the key's length) of every child."""
        start = page * PAGE_BYTES
        number, pad, flags, lower, upper = _PAGE.unpack_from(self._data, start)
        count = (lower - PAGE_HEADER_BYTES) // 2
        if (number, pad, flags) != (page, 0, BRANCH) or not lower <= upper <= PAGE_BYTES:
            self._fail(page, "the page is no sound branch")
        if count < 1 or lower % 2:
            self._fail(page, "the page is no sound branch")
        children = []
        for at in struct.unpack_from(f"<{count}H", self._data, start + PAGE_HEADER_BYTES):
            if not upper <= at <= PAGE_BYTES - NODE_HEADER_BYTES:
                self._fail(page, "a node lies outside the page")
            low, middle, high, key_bytes = _NODE.unpack_from(self._data, start + at)
            if at + NODE_HEADER_BYTES + key_bytes > PAGE_BYTES:
                self._fail(page, "a key lies outside the page")
            child = low | middle << 16 | high << 32
            children.append((child, start + at + NODE_HEADER_BYTES, key_bytes))
        return children

    def _special_value(
        self, page: int, at: int, counts: _Counts, inner: list[_Database] | None
    ) -> None:
        """A value in pages of its own, or a named database."""
        low, high, flags, key_bytes = _NODE.unpack_from(self._data, at)
        size = low | high << 16
        value = at + NODE_HEADER_BYTES + key_bytes
        if flags & NODE_DATABASE:
            if inner is None or size != _DATABASE.size:
                self._fail(page, "a named database stands where there can be none")
            inner.append(_Database(*_DATABASE.unpack_from(self._data, value)))
            return
        (first,) = _PAGE_NUMBER.unpack_from(self._data, value)
        page_count = -(-(PAGE_HEADER_BYTES + size) // PAGE_BYTES)
        self._use(first, page_count)
        number, _, kind, told = _OVERFLOW_PAGE.unpack_from(self._data, first * PAGE_BYTES)
        if (number, kind, told) != (first, OVERFLOW, page_count):
            self._fail(first, "the pages of a long value are not what is told")
        counts.overflow_pages += page_count

    def _read_free_list(self, page: int, levels: int) -> None:
        """The numbers of all free pages; the tree was found sound before."""
        if levels > 1:
            for child, _, _ in self._branch(page):
                self._read_free_list(child, levels - 1)
            return
        start = page * PAGE_BYTES
        lower = _PAGE.unpack_from(self._data, start)[3]
        count = (lower - PAGE_HEADER_BYTES) // 2
        for at in struct.unpack_from(f"<{count}H", self._data, start + PAGE_HEADER_BYTES):
            low, high, flags, key_bytes = _NODE.unpack_from(self._data, start + at)
            size = low | high << 16
            value = start + at + NODE_HEADER_BYTES + key_bytes
            if flags & NODE_BIG:
                (first,) = _PAGE_NUMBER.unpack_from(self._data, value)
                value = first * PAGE_BYTES + PAGE_HEADER_BYTES
            words = np.frombuffer(self._data, np.dtype("<u8"), size // _WORD, value)
            # LMDB writes a list with room to grow: only the first word says how long it is
            if not len(words) or int(words[0]) >= len(words):
                self._fail(page, "the list of free pages makes no sense")
            pages = words[1 : 1 + int(words[0])]
            if len(pages) > 1 and not (pages[:-1] > pages[1:]).all():
                self._fail(page, "the list of free pages is out of order")
            self._freed += pages.tolist()


def check_lmdb_file(path: Path) -> None:
    """Check a file, which may be missing or empty. Raises DataLoss that names it and the byte."""
    with path.open("rb") if path.exists() else open("/dev/null", "rb") as file:
        size = path.stat().st_size if path.exists() else 0
        if not size:
            return
        if size < META_PAGES * PAGE_BYTES:
            raise DataLoss(f"{path} is damaged at byte {size}: it ends inside its first pages")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    walker = _Walker(path, data)
    del walker
    data.close()
