"""The quota of a namespace: what all its topics take together, on whichever workers they are.

No topic inherits it, and none can set a value of its own over it, as with a policy (policy.py): it bounds a tenant, and
is set by who runs the broker. Values can be changed at any time.
"""

from __future__ import annotations

import msgspec

__all__ = ["NO_QUOTA", "NamespaceQuota"]


class NamespaceQuota(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Values in force for one namespace. 0 means: no limit."""

    namespace_storage_bytes_max: int = 0
    """Bytes that its reliable topics keep, in logs and in history. Publishes above it are refused."""
    namespace_topics_max: int = 0
    """Topics. One more is refused, whether it is created or would be made by a publish."""
    namespace_handles_max: int = 0
    """Open producers, consumers and readers, each counted for each partition that it is open on. One more is refused."""
    namespace_publish_messages_per_second: int = 0
    """Published to all its topics. Publishes above it are told when to send again."""
    namespace_publish_bytes_per_second: int = 0
    """The same in bytes of frames."""
    namespace_dispatch_messages_per_second: int = 0
    """Handed out by all its subscriptions and readers. Messages above it wait; none is dropped."""
    namespace_dispatch_bytes_per_second: int = 0
    """The same in bytes."""

    @property
    def publish_rates(self) -> tuple[int, int]:
        """Messages and bytes a second that may be published."""
        return self.namespace_publish_messages_per_second, self.namespace_publish_bytes_per_second

    @property
    def dispatch_rates(self) -> tuple[int, int]:
        """Messages and bytes a second that may be handed out."""
        return self.namespace_dispatch_messages_per_second, self.namespace_dispatch_bytes_per_second


NO_QUOTA = NamespaceQuota()
