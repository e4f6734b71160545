"""Every administrative operation, once: a typed function, its permission, its documentation.

The command line, HTTP and the Python client are faces of this registry: they name an operation and
give arguments, `run` checks them, asks `authorize` and calls the function. Operations run in the
coordinator. Those that need a worker's word ask for it and answer later; nothing here waits.

    admin_registry        how operations are entered and run
    admin_topics, admin_moves, admin_subscriptions, admin_policies, admin_clients, admin_cluster
                          the operations
"""

from __future__ import annotations

from danube_fast.broker import (
    admin_clients,
    admin_cluster,
    admin_moves,
    admin_policies,
    admin_subscriptions,
    admin_topics,
)
from danube_fast.broker.admin_registry import OPERATIONS, AdminContext, Answer, Operation, run

__all__ = ["OPERATIONS", "AdminContext", "Answer", "Operation", "run"]

_ENTERED = (
    admin_clients, admin_cluster, admin_moves, admin_policies, admin_subscriptions, admin_topics,
)  # fmt: skip
"""Importing them has entered their operations."""
