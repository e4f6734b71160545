"""Administrative operations on namespaces and on the broker as a whole."""

from __future__ import annotations

from danube_fast.broker.admin.registry import (
    AdminContext,
    Answer,
    Steps,
    operation,
)
from danube_fast.broker.admin.visibility import Visibility, answer_in_slices
from danube_fast.broker.topics.quota import NO_QUOTA
from danube_fast.errors import PermissionDenied
from danube_fast.types import CLUSTER, Permission

__all__: list[str] = []


@operation(Permission.MANAGE_NAMESPACE, "namespace")
def create_namespace(context: AdminContext, answer: Answer, *, namespace: str) -> None:
    """Create a namespace. AlreadyExists if there is one of that name."""
    context.topics.namespaces.create(namespace, context.clock.wall_ns())
    answer.done({"namespace": namespace})


@operation(Permission.MANAGE_NAMESPACE, "namespace")
def delete_namespace(context: AdminContext, answer: Answer, *, namespace: str) -> None:
    """Delete a namespace; it must be empty. One with a quota also needs the right to set that: made again, it would have
    none."""
    has_quota = context.topics.namespaces.quota(namespace) != NO_QUOTA
    if has_quota and not answer.asker.may(Permission.MANAGE_CLUSTER, CLUSTER):
        raise PermissionDenied(
            f"namespace {namespace} has a quota, and deleting it takes that away; ask an administrator of the broker"
        )
    context.topics.namespaces.delete(namespace, context.topics.topics(namespace))
    answer.done({"namespace": namespace})


@operation(Permission.LOOKUP, is_filtered=True)
def list_namespaces(context: AdminContext, answer: Answer) -> None:
    """List the namespaces that the caller may look up, and how many topics each has."""
    names = context.topics.namespaces.names()
    visibility = Visibility(context, answer.asker)

    def steps() -> Steps:
        found: list[str] = []
        for name in names:
            if visibility.shows_namespace(name):
                found.append(name)
            yield None
        count = context.topics.by_name.count
        answer.done([{"namespace": name, "topics": count(name)} for name in found])

    answer_in_slices(context, answer, steps)


@operation(Permission.MANAGE_BROKER)
def cluster_status(context: AdminContext, answer: Answer) -> None:
    """Processes with pid, state, epoch and restarts; logs, counters, data directory."""
    answer.done(context.status())
