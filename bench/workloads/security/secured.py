"""A secured broker for one run, and its users.

    bootstrap key, once --> admin     admin at cluster scope, a key
                        --> bench     producer and consumer in the namespace `default`, operator at cluster scope, a
                                      key, and the number of the local user: shared memory is open to it

The harness and the members of the run are `bench`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import danube_fast
from danube_fast.bench.load.processes import Broker
from danube_fast.bench.load.rig import Rig
from danube_fast.bench.plan import Plan
from danube_fast.security.curve import KeyPair, new_key_pair, read_key_file, write_key_file

__all__ = ["ADMIN", "WORKERS", "Secured", "secured", "secured_plan"]

ADMIN, MEMBER = "admin", "bench"
AUTH = {"auth": "required"}
WORKERS = 1
"""Each broker of a pair has one, so that an idle one takes little from the one that is measured."""
_ROLES = {
    ADMIN: [("admin", "cluster")],
    MEMBER: [
        ("producer", "namespace:default"),
        ("consumer", "namespace:default"),
        ("operator", "cluster"),
    ],
}


class Secured:
    """A running secured broker, and keys of its users."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        first = self._connect(broker.data_dir / "bootstrap-admin.key")
        with first as client:  # good for one connection
            for user, roles in _ROLES.items():
                self.add(client, user, roles)
            client.admin.set_credential(f"uid:{os.getuid()}", MEMBER)
        broker.access = self.access(MEMBER)

    @property
    def server_key(self) -> str:
        """The key by which the broker is known."""
        return str(self.broker.ready["server_key"])

    def _path(self, user: str) -> Path:
        return self.broker.folder / f"{user}.key"

    def _connect(self, key_file: Path) -> danube_fast.Client:
        return danube_fast.connect(
            self.broker.url, transport="zmq", server_key=self.server_key, key_file=key_file
        )

    def add(self, client: danube_fast.Client, user: str, roles: list[tuple[str, str]]) -> None:
        """Make a user with a key, bound to these roles, each within its scope."""
        pair = new_key_pair()
        write_key_file(self._path(user), pair)
        client.admin.set_principal(user)
        client.admin.set_credential(f"curve:{pair.public}", user)
        for number, (role, scope) in enumerate(roles):
            client.admin.set_binding(f"{user}-{number}", f"user:{user}", role, scope)

    def access(self, user: str) -> dict[str, Any]:
        """By what clients of a user come in."""
        return {"server_key": self.server_key, "key_file": str(self._path(user))}

    def pair(self, user: str) -> KeyPair:
        """The keys of a user."""
        return read_key_file(self._path(user))

    def connect(self, user: str) -> danube_fast.Client:
        """Come in as that user, over tcp."""
        return self._connect(self._path(user))


def secured_plan(plan: Plan) -> Plan:
    """The same plan on a broker that asks who its clients are."""
    return msgspec.structs.replace(plan, broker={**plan.broker, **AUTH})


@contextlib.contextmanager
def secured(rig: Rig, plan: Plan) -> Iterator[Secured]:
    """A secured broker for one run alone."""
    with rig.own_broker(plan.workload, WORKERS, secured_plan(plan).settings) as broker:
        yield Secured(broker)
