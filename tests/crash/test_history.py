"""What the kill test would say of deliveries that should not be, or of ones that may be."""

from __future__ import annotations

import numpy as np
import pytest

from tests.crash.history import NOTICED_NS, History
from tests.crash.payloads import DURABLE, RECEIVED, RECORD_DTYPE

SECOND = 1_000_000_000
KILL = 100 * SECOND
TOPIC = "/default/o2"


def record(*rows):
    """(kind, generation, offset, seconds after the kill) of one consumer."""
    made = np.zeros(len(rows), RECORD_DTYPE)
    for place, (kind, generation, offset, seconds) in enumerate(rows):
        made[place]["kind"], made[place]["generation"] = kind, generation
        made[place]["offset"], made[place]["at_ns"] = offset, KILL + int(seconds * SECOND)
    return made


ACKED = record((RECEIVED, 1, 7, 0.5), (DURABLE, 1, 7, 0.6))
"""A consumer that came behind the kill."""


def judge(*records):
    """The excused, or AssertionError."""
    history = History("")
    history.kills_ns.append(KILL)
    history.content[TOPIC] = {}
    assert history.cursor(TOPIC, list(records), []) == 1
    return history.excused


def test_what_waited_in_a_consumer_since_before_the_kill_may_come():
    other = record((RECEIVED, 1, 6, -1), (RECEIVED, 1, 7, 0.7), (RECEIVED, 2, 9, 1))
    assert judge(ACKED, other) == 1


@pytest.mark.parametrize(
    "rows",
    [
        [(RECEIVED, 1, 6, -1), (RECEIVED, 2, 7, 0.7)],
        [(RECEIVED, 1, 6, -1), (RECEIVED, 1, 7, 0.7)],
        [(RECEIVED, 1, 7, 0.7), (RECEIVED, 1, 8, NOTICED_NS / SECOND + 1), (RECEIVED, 2, 9, 6)],
        [(RECEIVED, 1, 6, 0.1), (RECEIVED, 1, 7, NOTICED_NS / SECOND + 1), (RECEIVED, 2, 9, 6)],
        [(DURABLE, 1, 7, -0.1), (RECEIVED, 1, 7, 0.7), (RECEIVED, 2, 9, 1)],
    ],
    ids=["new subscription", "not ended", "ended long after", "late", "acked before the kill"],
)
def test_what_was_durably_acked_must_not_come_again(rows):
    with pytest.raises(AssertionError, match="came again although acked"):
        judge(ACKED, record(*rows))
