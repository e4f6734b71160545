"""Limits of changes of rights, and of questions about them."""

from __future__ import annotations

from collections.abc import Sequence

from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.security.audit import ITEMS_MAX
from danube_fast.security.records import BOOTSTRAP, Binding
from danube_fast.security.scopes import parse_scope

__all__ = [
    "check_is_no_binding_of_first",
    "check_is_not_first",
    "check_is_shown",
    "check_resource",
]


def check_is_not_first(principal: str) -> None:
    """Raise FailedPrecondition for the user of the key that a broker begins with: that is good once, and for nothing else."""
    if principal == BOOTSTRAP:
        raise FailedPrecondition(f"{principal} has its key file only; make a user of your own")


def check_is_no_binding_of_first(binding: Binding) -> None:
    """Raise FailedPrecondition for a binding of that user, and for the name of the one that it has."""
    check_is_not_first(binding.subject.removeprefix("user:"))
    if binding.binding == BOOTSTRAP:
        raise FailedPrecondition(
            f"the binding {BOOTSTRAP} is of the key that a broker begins with; give this one another name"
        )


def check_is_shown(credentials: Sequence[str], roles: Sequence[str], groups: Sequence[str]) -> None:
    """Raise InvalidArgument for more than the audit log shows of one change, repetitions counted: they would hide others."""
    in_parts = "give them in several changes"
    by_roles = "leave some out, or bind their roles to the user itself, in several changes"
    for what, given, remedy in (
        ("credentials", credentials, in_parts), ("roles", roles, in_parts), ("groups", groups, by_roles),
    ):  # fmt: skip
        if len(given) > ITEMS_MAX:
            raise InvalidArgument(
                f"{len(given)} {what} in one change are more than the audit log shows, {ITEMS_MAX}: {remedy}"
            )


def check_resource(resource: str) -> None:
    """Raise InvalidArgument for what names no one thing that rights are asked for. A subscription has any name."""
    path, _, subscription = resource.partition("#")
    parse_scope(path if path.startswith("/") and subscription else resource)
    if "*" in resource or "?" in resource:
        raise InvalidArgument(
            f"{resource!a:.300} is a pattern, and rights are asked for one thing: write it without '*' and '?'"
        )
