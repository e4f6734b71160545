"""Many records of a policy, and questions about them whose answers are known.

10,000 principals, 1,000 roles, 100,000 bindings: all of principals, or one half of groups with 25 each
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from danube_fast.clock import SystemClock
from danube_fast.metadata.store import CHANGES_MAX
from danube_fast.security.policy import Policy
from danube_fast.security.records import Binding, Principal, Record, Role
from danube_fast.types import Permission
from danube_fast.workers.coordinator.security import SecurityDirectory
from danube_fast.workers.process.access import Access
from danube_fast.workers.process.environment import Environment

__all__ = [
    "BINDINGS",
    "PRINCIPALS",
    "ROLES",
    "Question",
    "make_records",
    "questions",
    "store_records",
]
__all__ += ["load_records", "user_name"]

PRINCIPALS, ROLES, BINDINGS = 10_000, 1000, 100_000
GROUP_BINDINGS = 25
GROUPS_EACH = 2
NAMESPACES, TOPICS = 50, 400
_SEED = 20


class Question(NamedTuple):
    """One of `Policy.permits`."""

    principal: str
    permission: Permission
    resource: str
    is_granted: bool
    """Whether a binding grants it for certain; others may be granted by chance."""


def user_name(number: int) -> str:
    """The name of a principal."""
    return f"user-{number:05}"


def make_records(*, with_groups: bool) -> list[Record]:
    """All records, the same each time; `with_groups`: half of the bindings are of groups."""
    rng = random.Random(_SEED)
    permissions = list(Permission)
    groups = max(1, BINDINGS // 2 // GROUP_BINDINGS) if with_groups else 0
    made: list[Record] = [
        Role(f"role-{number}", rng.sample(permissions, rng.randint(1, 4)))
        for number in range(ROLES)
    ]
    for number in range(PRINCIPALS):
        mine = rng.sample(range(groups), min(groups, GROUPS_EACH))
        made.append(Principal(user_name(number), [f"group-{each}" for each in mine]))
    for number in range(BINDINGS):
        of_group = groups and number % 2
        subject = f"group:group-{number // 2 % groups}" if of_group else f"user:{_owner(number)}"
        role = f"role-{rng.randrange(ROLES)}"
        made.append(Binding(f"binding-{number}", subject, role, _scope(rng)))
    return made


def _owner(number: int) -> str:
    return user_name(number % PRINCIPALS)


def _scope(rng: random.Random) -> str:
    namespace, topic = f"space-{rng.randrange(NAMESPACES)}", f"topic-{rng.randrange(TOPICS)}"
    return rng.choice(
        [
            f"/{namespace}/{topic}", f"/{namespace}/{topic}", f"/{namespace}/{topic}#billing",
            f"/{namespace}/{topic[:-1]}*", f"namespace:{namespace}", f"subject:{topic}",
        ]
    )  # fmt: skip


def questions(records: Sequence[Record], count: int) -> list[Question]:
    """Draw questions: of every two, one that a binding grants and one about any topic."""
    rng = random.Random(_SEED)
    roles = {each.name: each for each in records if isinstance(each, Role)}
    bindings = [each for each in records if isinstance(each, Binding) and "user:" in each.subject]
    found = []
    for number in range(count):
        binding = rng.choice(bindings)
        user = binding.subject.removeprefix("user:")
        permission = rng.choice(roles[binding.role].permissions)
        if number % 2:
            namespace, topic = rng.randrange(NAMESPACES), rng.randrange(TOPICS)
            resource = f"/space-{namespace}/topic-{topic}"
            found.append(Question(user, rng.choice(list(Permission)), resource, False))
        else:
            resource = binding.scope.replace("*", "")
            is_granted = "#" not in resource or permission in (
                Permission.CONSUME,
                Permission.LOOKUP,
            )
            found.append(Question(user, permission, resource, is_granted))
    return found


# ------------------------------------------------------------------ of a broker that is stopped


class _NoPeers:
    """A mailbox without other processes."""

    def __init__(self) -> None:
        self.epoch_watchers: list[Any] = []

    def serve(self, kind: Any, handler: Any) -> None:
        """None asks."""


def store_records(data_dir: Path, records: Sequence[Record]) -> None:
    """Write the records to the store of a broker that is stopped."""
    clock, some = SystemClock(), iter(records)
    store = Environment().make_store(data_dir, clock)
    try:
        mailbox: Any = _NoPeers()
        directory = SecurityDirectory(store, mailbox, clock, Access(clock))
        for each in _slices(some):
            directory.change(each)
    finally:
        store.close()


def _slices(records: Iterator[Record]) -> Iterator[list[Record]]:
    while some := list(itertools.islice(records, CHANGES_MAX)):
        yield some


def load_records(data_dir: Path) -> Policy:
    """Read all records from there, as a coordinator does when it starts."""
    clock = SystemClock()
    store = Environment().make_store(data_dir, clock)
    try:
        mailbox: Any = _NoPeers()
        return SecurityDirectory(store, mailbox, clock, Access(clock)).policy
    finally:
        store.close()
