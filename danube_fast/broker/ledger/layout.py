"""Where the ledger of a subscription keeps what: words and columns that its kernels read and write.

    head   int64 words, one block a subscription (`HeadWord`)
    table  int64 an entry: what is known of PAGE_MESSAGES offsets; from page number FIRST_PAGE on
           UNTOUCHED | ALL_SETTLED | ALL_SETTLED_NEW | address of a page
    page   64 bytes of words (`PageWord`), then columns: state u32, attempts u16 and, in pages of a
           key_shared subscription, route u32
    rows   int64 words, a row a delivery (`RowWord`); free rows form a list, those in use too
    pool   int64 words: how many free pages there are, and where their addresses stand

The state of a message is one number: `State`, or UNACKED + the row of its delivery.
"""

from __future__ import annotations

import enum

WORD_BYTES = 8
BUCKET_SHIFT = 14
BUCKETS = 1 << BUCKET_SHIFT
NO_SLOT = 0xFFFF
STAYS = 0xFFFE
"""In place of a slot: no consumer takes the message, or it stays where it is."""
PAGE_SHIFT = 11
PAGE_MESSAGES = 1 << PAGE_SHIFT
UNTOUCHED = 0
ALL_SETTLED = 1
ALL_SETTLED_NEW = 2
"""All settled, and no record says so yet."""

AT_STATES = 64
AT_ATTEMPTS = AT_STATES + 4 * PAGE_MESSAGES
AT_ROUTES = AT_ATTEMPTS + 2 * PAGE_MESSAGES
PAGE_BYTES = AT_ROUTES
ROUTED_PAGE_BYTES = AT_ROUTES + 4 * PAGE_MESSAGES

NEED_ROWS = -1
NEED_TABLE = -2
NEED_PAGES = -3
"""What a kernel returns before it has done anything: grow that and call it again."""


class State(enum.IntEnum):
    """States of a message that is with no consumer."""

    FRESH = 0
    """Never handed out."""
    SETTLED = 1
    """Needs no delivery any more, and a record says so."""
    WAITING = 2
    """To be handed out before anything fresh."""
    DELAYED = 3
    """Handed out again when its time has come."""
    BLOCKED = 4
    """Given back too often: stays until the failure policy or a seek decides."""
    SETTLED_NEW = 5
    """Settled, and no record says so yet."""
    UNACKED = 8
    """From here on: unacked, in the delivery of that row."""


class HeadWord(enum.IntEnum):
    """The head of a ledger."""

    CURSOR = 0
    """All below is settled."""
    NEXT = 1
    """Nothing from here on was handed out."""
    TABLE = 2
    FIRST_PAGE = 3
    TABLE_PAGES = 4
    ROWS = 5
    FREE_ROW = 6
    """First of the free rows, -1 for none."""
    OLDEST = 7
    """The row that is unacked longest; -1 for none. Rows form a list in the order of TIME_NS."""
    NEWEST = 8
    POOL = 9
    PAGE_SIZE = 10
    """Bytes of a page."""
    UNACKED = 11
    """Messages in that state, as in the next four."""
    WAITING = 12
    DELAYED = 13
    BLOCKED = 14
    SETTLED = 15
    """Those above the cursor."""
    FIRST_WAITING = 16
    """No message below is WAITING."""
    RECORDED = 17
    """All below is settled, and records say so."""
    DIRTY_LOW = 18
    """Every SETTLED_NEW at or above the cursor is in [DIRTY_LOW, DIRTY_HIGH)."""
    DIRTY_HIGH = 19
    BUCKETS = 20
    """Address of a row for each bucket of keys, 0 if messages are not routed by key."""
    UNBLOCKED = 21
    """A bucket is free again for which messages wait."""
    EVER_SETTLED = 22
    """Messages settled by kernels, ever."""


class BucketWord(enum.IntEnum):
    """A bucket of keys. Its messages are with one consumer at a time, in their order."""

    SLOT = 0
    """The slot that the messages are with, while UNACKED is not 0."""
    UNACKED = 1
    """Messages that are unacked."""
    WAITING = 2
    """Messages that wait: those behind them wait too."""
    MARK = 3
    """Number of the last pass in which a message had to stay."""


class RouteWord(enum.IntEnum):
    """Arguments of the kernels that route: addresses unless said."""

    BASE = 0
    """Offset of the frame's first message."""
    ROWS = 1
    """int32 messages of the frame, rising."""
    COUNT = 2
    """How many."""
    HASHES = 3
    """int64 hash of every message's key, by row; 0: no message has one."""
    MASKS = 4
    """u16 which table of owners, by row; 0: the first."""
    OWNERS = 5
    """int64 addresses of tables: u16 slot by bucket."""
    ALLOWANCE = 6
    """int64 messages that each slot may take."""
    SLOTS = 7
    """u16 answers, one a row."""
    PASS = 8
    """Number of the pass."""
    IS_WAITING = 9
    """1: the messages waited before, and their routes are known."""
    TABLES = 10
    """How many tables of owners there are."""


class PageWord(enum.IntEnum):
    """The head of a page."""

    SETTLED = 0
    """Messages in the page that are settled, recorded or not."""
    SETTLED_NEW = 1
    """Those of them that may be SETTLED_NEW; 0: none is, and there is no need to look."""
    WAITING = 2
    """Messages in the page that wait."""


class RowWord(enum.IntEnum):
    """A delivery: some messages of [START, END) that went to one consumer together."""

    START = 0
    END = 1
    SLOT = 2
    """Whom it went to; -1: the row is free, and FOLLOWING is the next free one."""
    TIME_NS = 3
    """When, monotonic nanoseconds."""
    LEFT = 4
    """Messages of it that are unacked still."""
    BEFORE = 5
    FOLLOWING = 6
    DEADLINE_NS = 7
    """Of a delivery without a time: until when its messages were extended."""
    FRAME = 8
    """Number of the frame among all that its consumer was sent."""


HEAD_WORDS = 24
ROW_WORDS = len(RowWord)

# For kernels.
ROW_BYTES = ROW_WORDS * WORD_BYTES
BUCKET_BYTES = len(BucketWord) * WORD_BYTES
PAGE_MASK = PAGE_MESSAGES - 1
BUCKET_MASK = BUCKETS - 1
