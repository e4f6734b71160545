"""Administrative operations on namespaces and on the broker as a whole."""

from __future__ import annotations

from danube_fast.broker.admin.registry import AdminContext, Answer, operation
from danube_fast.types import Permission

__all__: list[str] = []


@operation(Permission.MANAGE_NAMESPACE, "namespace")
def create_namespace(context: AdminContext, answer: Answer, *, namespace: str) -> None:
    """Create a namespace. AlreadyExists if there is one of that name."""
    context.topics.namespaces.create(namespace, context.clock.wall_ns())
    answer.done({"namespace": namespace})


@operation(Permission.MANAGE_NAMESPACE, "namespace")
def delete_namespace(context: AdminContext, answer: Answer, *, namespace: str) -> None:
    """Delete a namespace; it must be empty."""
    context.topics.namespaces.delete(namespace, context.topics.topics(namespace))
    answer.done({"namespace": namespace})


@operation(Permission.LOOKUP)
def list_namespaces(context: AdminContext, answer: Answer) -> None:
    """List all namespaces and how many topics each has."""
    answer.done(
        [
            {"namespace": name, "topics": len(context.topics.topics(name))}
            for name in context.topics.namespaces.names()
        ]
    )


@operation(Permission.MANAGE_BROKER)
def cluster_status(context: AdminContext, answer: Answer) -> None:
    """Processes with pid, state, epoch and restarts; logs, counters, data directory."""
    answer.done(context.status())
