"""The administrative operation on the audit log: it is read, and changed by no one."""

from __future__ import annotations

from danube_fast.broker.admin.registry import AdminContext, Answer, operation
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.types import Permission

__all__: list[str] = []


@operation(Permission.MANAGE_CLUSTER)
def list_audit(
    context: AdminContext, answer: Answer, *, since_seconds: int = 0, principal: str = "",
    denied: bool = False, after: str = "",
) -> None:  # fmt: skip
    """List records of the audit log, oldest first: of the last `since_seconds` (0: all), of a principal, the denied ones
    alone. Answers a page {"records", "after", "is_last"}; the next one is behind `after`. A page may have no record."""
    if since_seconds < 0:
        raise InvalidArgument(f"since_seconds is {since_seconds}; write 0 or more")
    if context.audit is None:
        raise FailedPrecondition(
            "this broker keeps no audit log; serve it with --auth required, or with audit = on"
        )
    answer.done(
        context.audit.read(after, since_seconds=since_seconds, principal=principal, denied=denied)
    )
