"""The systems that `--peers` knows by name."""

from __future__ import annotations

import difflib

from danube_fast.bench.peers.adapter import Adapter
from danube_fast.bench.peers.danube import Danube
from danube_fast.bench.peers.iceoryx import Iceoryx
from danube_fast.bench.peers.kafka import Kafka, Redpanda
from danube_fast.bench.peers.mosquitto import Mosquitto
from danube_fast.bench.peers.nats import Nats
from danube_fast.bench.peers.rabbitmq import RabbitMQ
from danube_fast.bench.peers.redis import Redis
from danube_fast.bench.peers.zenoh import Zenoh
from danube_fast.bench.peers.zeromq import ZeroMQ
from danube_fast.errors import InvalidArgument

__all__ = ["ADAPTERS", "ALL", "absence", "find", "select"]

ALL = "all"
_SYSTEMS = (
    ZeroMQ(),
    Iceoryx(),
    Zenoh(),
    Nats(),
    Redis(),
    RabbitMQ(),
    Mosquitto(),
    Kafka(),
    Redpanda(),
    Danube(),
)
ADAPTERS: dict[str, Adapter] = {system.name: system for system in _SYSTEMS}


def select(text: str) -> list[str]:
    """The names in a list with commas; `all`: every one. Raises InvalidArgument."""
    known = list(ADAPTERS)
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
    return ADAPTERS[name].absence()


def find(name: str) -> Adapter:
    """The adapter of a system."""
    return ADAPTERS[name]
