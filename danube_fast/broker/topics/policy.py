"""The policy of a topic, what is allowed and kept: retention, time to live, quotas, limits, rates.

A namespace sets values for all its topics, a topic sets its own over them, and what neither sets is
the default: no limit. Values can be changed at any time. All of them are of one topic: a rate is
shared by the topic's partitions, a number of consumers is that of each partition, which every
consumer of the topic attends.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from danube_fast.broker.topics.quota import NamespaceQuota
from danube_fast.checks import in_our_words, parse_amount, unit_of
from danube_fast.errors import InvalidArgument

__all__ = ["BacklogPolicy", "RetentionPolicy", "TopicPolicy", "effective", "merge_values"]

VALUE_MAX = 1 << 53
"""Numbers stay exact in every language's JSON."""
SECONDS_MAX = 100 * 366 * 24 * 3600


class RetentionPolicy(enum.StrEnum):
    """How long messages stay."""

    UNTIL_ACKED = "until_acked"
    """Until every subscription acked them, and then for `retention_seconds` or as long as
    `retention_bytes` allows."""
    UNTIL_EXPIRED = "until_expired"
    """Until they are older than `retention_seconds` or more than `retention_bytes` follow, acked or not."""
    FOREVER = "forever"
    """Always."""


class BacklogPolicy(enum.StrEnum):
    """The remedy when unacked messages take more than `backlog_bytes_max`."""

    REFUSE = "refuse"
    """Producers are refused until consumers have caught up."""
    EVICT = "evict"
    """The oldest unacked messages count as acked; consumers are told which."""


class TopicPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Values in force for one topic. 0 means: no limit, or the broker's own setting."""

    retention_policy: RetentionPolicy = RetentionPolicy.UNTIL_ACKED
    """`until_acked`: until every subscription acked, and then as long as the next two say. `until_expired`: as long as
    they say, acked or not. `forever`."""
    retention_seconds: int = 0
    """How long messages stay. 0: `retention_seconds_min` of the broker, if `retention_bytes` is 0 too."""
    retention_bytes: int = 0
    """So much of each partition stays, the newest. The smaller of the two bounds counts."""
    message_ttl_ms: int = 0
    """Messages older than this count as acked."""
    backlog_bytes_max: int = 0
    """Unacked bytes of a partition."""
    backlog_policy: BacklogPolicy = BacklogPolicy.REFUSE
    """What happens above that: `refuse` publishes until consumers have caught up, or `evict` the oldest messages."""
    compaction: bool = False
    """Of messages with the same key only the newest stays. Reliable topics in the log only."""
    subscription_expiry_seconds: int = 0
    """A subscription without consumers for so long is deleted. A restart of its worker begins the time anew."""
    producers_max: int = 0
    """Producers of the topic. One more is refused."""
    consumers_max: int = 0
    """Consumers of the topic, likewise."""
    subscriptions_max: int = 0
    """Subscriptions of the topic, likewise."""
    consumers_per_subscription_max: int = 0
    """Consumers of one subscription, likewise."""
    message_bytes_max: int = 0
    """Largest payload. Of a compressed batch the mean counts."""
    storage_bytes_max: int = 0
    """What the topic keeps; set for a namespace: what all its topics keep together. Looked at once a second."""
    publish_messages_per_second: int = 0
    """Of the topic, on whichever workers it is. Publishes above it are told when to send again."""
    publish_bytes_per_second: int = 0
    """The same in bytes."""
    dispatch_messages_per_second: int = 0
    """Of each subscription. Messages above it wait; none is dropped."""
    dispatch_bytes_per_second: int = 0
    """The same in bytes."""

    @property
    def stays(self) -> bool:
        """Whether all messages stay, acked or not, for ever or for a time: history is made of these."""
        return self.retention_policy is not RetentionPolicy.UNTIL_ACKED and not self.compaction

    @property
    def bounds_storage(self) -> bool:
        """Whether ages and sizes have to be looked at."""
        return bool(
            self.retention_policy is not RetentionPolicy.UNTIL_ACKED
            or self.retention_seconds
            or self.retention_bytes
            or self.message_ttl_ms
            or self.backlog_bytes_max
            or self.subscription_expiry_seconds
            or self.storage_bytes_max
        )


_OWNERS: dict[type[msgspec.Struct], str] = {
    TopicPolicy: "a topic's policy",
    NamespaceQuota: "a namespace's quota",
}


def _parse(values: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Values as they are recorded; None (or the text "default") takes a value back. InvalidArgument."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(kind)}
    unknown = sorted(set(values) - set(kinds))
    if unknown:
        text = (
            f"{unknown[0]!r} is no value of {_OWNERS[kind]}; there are: {', '.join(sorted(kinds))}"
        )
        if unknown[0] in NamespaceQuota.__struct_fields__:
            text += f". {unknown[0]} is a quota: danube-fast namespaces set-quota"
        raise InvalidArgument(text)
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or value == "default":
            parsed[name] = None
            continue
        if isinstance(value, str) and unit_of(name):
            amount = parse_amount(name, value)
            value = value if amount is None else amount
        try:
            checked = msgspec.convert(value, kinds[name], strict=False)
        except msgspec.ValidationError as fault:
            raise InvalidArgument(
                f"{in_our_words(fault, name)}; see tuning.md, 'Policies'"
            ) from None
        if isinstance(checked, int) and not 0 <= checked <= VALUE_MAX:
            raise InvalidArgument(f"{name} must be from 0 to {VALUE_MAX}")
        if name.endswith("_seconds") and checked > SECONDS_MAX:
            raise InvalidArgument(f"{name} must be at most {SECONDS_MAX} (100 years)")
        parsed[name] = msgspec.to_builtins(checked)
    return parsed


def merge_values(
    before: Mapping[str, Any],
    changes: Mapping[str, Any],
    kind: type[msgspec.Struct] = TopicPolicy,
) -> dict[str, Any]:
    """Recorded values of a policy, or of a quota, after a change; checked as a whole. Raises InvalidArgument."""
    merged = {**before, **_parse(changes, kind)}
    return {name: value for name, value in merged.items() if value is not None}


def effective(namespace: Mapping[str, Any], topic: Mapping[str, Any]) -> TopicPolicy:
    """The policy in force for a topic. Raises InvalidArgument if the values do not go together."""
    policy = msgspec.convert({**namespace, **topic}, TopicPolicy)
    bounded = policy.retention_seconds or policy.retention_bytes
    if policy.retention_policy is RetentionPolicy.UNTIL_EXPIRED and not bounded:
        raise InvalidArgument(
            "retention_policy until_expired needs retention_seconds or retention_bytes"
        )
    return policy
