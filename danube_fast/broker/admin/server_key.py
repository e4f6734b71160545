"""Administrative operations on the server key: the key pair by which clients know a secured broker."""

from __future__ import annotations

from danube_fast.broker.admin.registry import AdminContext, Answer, operation
from danube_fast.types import Permission

__all__: list[str] = []


@operation(Permission.MANAGE_BROKER)
def describe_server_key(context: AdminContext, answer: Answer) -> None:
    """Describe the server key: {"stage", "active", "keys", "processes"}. `keys` are the public keys that clients should
    pin, the newest first; `processes` tells with which each process listens."""
    answer.done(context.server_key.describe())


@operation(Permission.MANAGE_CLUSTER)
def rotate_server_key(context: AdminContext, answer: Answer, *, step: str) -> None:
    """Take a step of the rotation of the server key, and describe it. `prepare` makes a second key, which clients are
    given beside the one in use; `activate` has each process listen with it, one after the other; `retire` ends the key
    before. `revert` undoes `prepare` or `activate`."""
    context.server_key.step(step, answer.end)
