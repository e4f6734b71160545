"""`danube-fast namespaces`: create, list, policies, delete."""

from __future__ import annotations

from typing import Annotated

import typer

from danube_fast.cli.broker import Ask, asking
from danube_fast.cli.options import PolicyArgument, YesOption, group, policy_values
from danube_fast.cli.output import print_policy, print_quota, refuse_without_yes

__all__ = ["app"]

app = group("namespaces", "Make namespaces for topics.", "danube-fast namespaces list")

NamespaceArgument = Annotated[str, typer.Argument(metavar="NAMESPACE", help="Its name.")]


@asking(app, "danube-fast namespaces create iot")
def create(ask: Ask, namespace: NamespaceArgument) -> None:
    """Create a namespace."""
    made = ask("create_namespace", namespace=namespace)
    ask.show(made, f"created namespace {namespace}")


@asking(app, "danube-fast namespaces list", name="list")
def list_namespaces(ask: Ask) -> None:
    """List all namespaces."""
    ask.table(ask("list_namespaces"), "no namespaces")


@asking(app, "danube-fast namespaces policy iot")
def policy(ask: Ask, namespace: NamespaceArgument) -> None:
    """Show what a namespace sets for its topics."""
    found = ask("namespace_policy", namespace=namespace)
    if found:
        print_policy(ask.form, found, dict.fromkeys(found, "namespace"))
    else:
        ask.show(found, f"{namespace} sets nothing: the defaults are in force")


@asking(
    app,
    "danube-fast namespaces set-policy iot retention_policy=until_expired retention_seconds=3600",
    "danube-fast namespaces set-policy iot publish_messages_per_second=1000",
    name="set-policy",
)
def set_policy(ask: Ask, namespace: NamespaceArgument, values: PolicyArgument) -> None:
    """Change what is kept and allowed of the topics of a namespace that set nothing else."""
    changed = ask("set_namespace_policy", namespace=namespace, values=policy_values(values))
    ask.show(changed, f"{namespace}: {' '.join(values)}")


@asking(app, "danube-fast namespaces describe iot")
def describe(ask: Ask, namespace: NamespaceArgument) -> None:
    """Show the quota of a namespace, and what is used of it."""
    print_quota(ask.form, ask("describe_namespace", namespace=namespace))


@asking(
    app,
    "danube-fast namespaces set-quota iot namespace_storage_bytes_max=10GiB",
    "danube-fast namespaces set-quota iot namespace_topics_max=100 namespace_handles_max=1000",
    name="set-quota",
)
def set_quota(ask: Ask, namespace: NamespaceArgument, values: PolicyArgument) -> None:
    """Bound what all topics of a namespace take together; for who manages the cluster."""
    changed = ask("set_namespace_quota", namespace=namespace, values=policy_values(values))
    ask.show(changed, f"{namespace}: {' '.join(values)}")


@asking(app, "danube-fast namespaces delete iot --yes")
def delete(ask: Ask, namespace: NamespaceArgument, yes: YesOption = False) -> None:
    """Delete a namespace, which must be empty."""
    refuse_without_yes(yes, f"deletes the namespace {namespace}")
    gone = ask("delete_namespace", namespace=namespace)
    ask.show(gone, f"deleted namespace {namespace}")
