"""Policies: what may be set, what is inherited, what is refused with words that help."""

from __future__ import annotations

import pytest

from danube_fast.broker.topics.policy import (
    BacklogPolicy,
    RetentionPolicy,
    TopicPolicy,
    effective,
    merge_values,
)
from danube_fast.errors import InvalidArgument


def test_a_topic_goes_before_its_namespace_and_that_before_the_default() -> None:
    namespace = merge_values({}, {"message_ttl_ms": 5000, "backlog_bytes_max": 100})
    topic = merge_values({}, {"backlog_bytes_max": 7, "backlog_policy": "evict"})
    policy = effective(namespace, topic)
    assert policy.message_ttl_ms == 5000
    assert policy.backlog_bytes_max == 7
    assert policy.backlog_policy is BacklogPolicy.EVICT
    assert policy.retention_policy is RetentionPolicy.UNTIL_ACKED


@pytest.mark.parametrize("back", [None, "default"])
def test_a_value_is_taken_back(back: str | None) -> None:
    before = merge_values({}, {"message_ttl_ms": 5000, "producers_max": 3})
    assert merge_values(before, {"message_ttl_ms": back}) == {"producers_max": 3}


def test_texts_of_a_command_line_are_numbers() -> None:
    assert merge_values({}, {"message_ttl_ms": "250", "compaction": "true"}) == {
        "message_ttl_ms": 250,
        "compaction": True,
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"ttl": 1}, "there are:.*message_ttl_ms"),
        ({"message_ttl_ms": "soon"}, "message_ttl_ms"),
        ({"message_ttl_ms": -1}, "from 0 to"),
        ({"retention_policy": "sometimes"}, "retention_policy"),
        ({"retention_seconds": 1 << 40}, "100 years"),
    ],
)
def test_what_cannot_be_set(values: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        merge_values({}, values)


def test_until_expired_needs_a_bound() -> None:
    with pytest.raises(InvalidArgument, match="retention_seconds or retention_bytes"):
        effective({}, {"retention_policy": "until_expired"})
    assert effective({"retention_bytes": 1}, {"retention_policy": "until_expired"})


def test_nothing_set_costs_nothing() -> None:
    assert not TopicPolicy().bounds_storage
