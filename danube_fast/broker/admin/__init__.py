"""Every administrative operation, once: a typed function, its permission, its documentation.

The command line, HTTP and the Python client are faces of this registry: they name an operation and
give arguments, `run` checks them, asks `authorize` and calls the function. Operations run in the
coordinator. Those that need a worker's word ask for it and answer later; nothing here waits.

    registry              how operations are entered and run
    topics, moves, history, subscriptions, policies, clients, cluster, security, server_key, audit
                          the operations
"""

from __future__ import annotations

from danube_fast.broker.admin import audit as admin_audit
from danube_fast.broker.admin import clients as admin_clients
from danube_fast.broker.admin import cluster as admin_cluster
from danube_fast.broker.admin import history as admin_history
from danube_fast.broker.admin import moves as admin_moves
from danube_fast.broker.admin import policies as admin_policies
from danube_fast.broker.admin import security as admin_security
from danube_fast.broker.admin import server_key as admin_server_key
from danube_fast.broker.admin import subscriptions as admin_subscriptions
from danube_fast.broker.admin import topics as admin_topics
from danube_fast.broker.admin.registry import (
    OPERATIONS,
    AdminContext,
    Answer,
    Operation,
    check,
    run,
)

__all__ = ["OPERATIONS", "AdminContext", "Answer", "Operation", "check", "run"]

_ENTERED = (
    admin_audit, admin_clients, admin_cluster, admin_history, admin_moves, admin_policies, admin_security,
    admin_server_key, admin_subscriptions, admin_topics,
)  # fmt: skip
"""Importing them has entered their operations."""
