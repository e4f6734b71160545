"""The systems that `--peers` knows by name."""

from __future__ import annotations

import difflib

from danube_fast.bench.peers.adapter import Adapter
from danube_fast.bench.peers.iceoryx import Iceoryx
from danube_fast.bench.peers.nats import Nats
from danube_fast.bench.peers.redis import Redis
from danube_fast.bench.peers.zenoh import Zenoh
from danube_fast.bench.peers.zeromq import ZeroMQ
from danube_fast.errors import InvalidArgument

__all__ = ["ADAPTERS", "ALL", "WITHOUT_ADAPTER", "absence", "find", "select"]

ALL = "all"
ADAPTERS: dict[str, Adapter] = {x.name: x for x in (ZeroMQ(), Iceoryx(), Zenoh(), Nats(), Redis())}

WITHOUT_ADAPTER = {
    "rabbitmq": "no adapter has been run against it; it takes a server and pip install pika",
    "mosquitto": "no adapter has been run against it; it takes a server and pip install paho-mqtt",
    "kafka": "no adapter has been run against it; it takes a server and pip install confluent-kafka",
}
"""Known, but never measured: nobody has run an adapter for them, so none is here."""


def select(text: str) -> list[str]:
    """The names in a list with commas; `all`: every one. Raises InvalidArgument."""
    known = [*ADAPTERS, *WITHOUT_ADAPTER]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidArgument(
            f"--peers names no system; choose {ALL} or some of {', '.join(known)}"
        )
    for name in names:
        if name != ALL and name not in known:
            near = difflib.get_close_matches(name, [*known, ALL], 1, 0.4)
            hint = f"did you mean {near[0]!r}?" if near else "choose among them"
            raise InvalidArgument(f"--peers knows no {name!r}; {hint} ({ALL}, {', '.join(known)})")
    return known if ALL in names else list(dict.fromkeys(names))


def absence(name: str) -> str | None:
    """Why a system cannot be measured here; None: it can."""
    adapter = ADAPTERS.get(name)
    return WITHOUT_ADAPTER[name] if adapter is None else adapter.absence()


def find(name: str) -> Adapter:
    """The adapter of a system that has one."""
    return ADAPTERS[name]
