"""`danube-fast namespaces`: create, list, policies, delete."""

from __future__ import annotations

from typing import Annotated

import typer

from danube_fast.cli.broker import operation
from danube_fast.cli.options import (
    DEFAULT_URL,
    OutputForm,
    OutputOption,
    PolicyArgument,
    UrlOption,
    YesOption,
    example,
    policy_values,
)
from danube_fast.cli.output import print_policy, print_result, print_table, refuse_without_yes

__all__ = ["app"]

app = typer.Typer(
    name="namespaces",
    help="Make namespaces for topics.",
    no_args_is_help=True,
    epilog=example("danube-fast namespaces list"),
)

NamespaceArgument = Annotated[str, typer.Argument(metavar="NAMESPACE", help="Its name.")]


@app.command(epilog=example("danube-fast namespaces create iot"))
def create(
    namespace: NamespaceArgument,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Create a namespace."""
    made = operation(url, "create_namespace", namespace=namespace)
    print_result(output, made, f"created namespace {namespace}")


@app.command("list", epilog=example("danube-fast namespaces list"))
def list_namespaces(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputForm.TEXT) -> None:
    """List all namespaces."""
    print_table(output, operation(url, "list_namespaces"), "no namespaces")


@app.command(epilog=example("danube-fast namespaces policy iot"))
def policy(
    namespace: NamespaceArgument,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Show what a namespace sets for its topics."""
    found = operation(url, "namespace_policy", namespace=namespace)
    if found:
        print_policy(output, found, dict.fromkeys(found, "namespace"))
    else:
        print_result(output, found, f"{namespace} sets nothing: the defaults are in force")


@app.command(
    "set-policy",
    epilog=example(
        "danube-fast namespaces set-policy iot retention_policy=until_expired retention_seconds=3600",
        "danube-fast namespaces set-policy iot publish_messages_per_second=1000",
    ),
)
def set_policy(
    namespace: NamespaceArgument,
    values: PolicyArgument,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Change what is kept and allowed of the topics of a namespace that set nothing else."""
    changed = operation(
        url, "set_namespace_policy", namespace=namespace, values=policy_values(values)
    )
    print_result(output, changed, f"{namespace}: {' '.join(values)}")


@app.command(epilog=example("danube-fast namespaces delete iot --yes"))
def delete(
    namespace: NamespaceArgument,
    yes: YesOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputForm.TEXT,
) -> None:
    """Delete a namespace, which must be empty."""
    refuse_without_yes(yes, f"deletes the namespace {namespace}")
    gone = operation(url, "delete_namespace", namespace=namespace)
    print_result(output, gone, f"deleted namespace {namespace}")
