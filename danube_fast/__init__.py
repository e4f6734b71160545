"""danube-fast: a publish/subscribe message broker for one big host.

    import danube_fast
    with danube_fast.connect("danube://127.0.0.1:6650") as client: ...

Importing this module is cheap: names are loaded when first used, kernels when a client is opened.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from danube_fast.version import VERSION as __version__  # noqa: N811 - the name that tools expect

if TYPE_CHECKING:
    from danube_fast.client.aio import AsyncConsumer, AsyncProducer, AsyncReader
    from danube_fast.client.async_client import AsyncClient
    from danube_fast.client.async_subscriber import AsyncSubscriber
    from danube_fast.client.client import Client
    from danube_fast.client.consume.batch import Batch
    from danube_fast.client.consumer import Consumer
    from danube_fast.client.entry import connect, connect_async
    from danube_fast.client.producer import Producer
    from danube_fast.client.reader import Reader
    from danube_fast.client.subscriber import Subscriber
    from danube_fast.client.values.message import Message, MessageId
    from danube_fast.errors import (
        AlreadyExists,
        DanubeError,
        DataLoss,
        DeadlineExceeded,
        FailedPrecondition,
        Internal,
        InvalidArgument,
        NotFound,
        PermissionDenied,
        ProducerFenced,
        ResourceExhausted,
        TopicDeleted,
        Unavailable,
    )

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncReader",
    "AsyncSubscriber",
    "Batch",
    "Client",
    "Consumer",
    "DanubeError",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "Message",
    "MessageId",
    "NotFound",
    "PermissionDenied",
    "Producer",
    "ProducerFenced",
    "Reader",
    "ResourceExhausted",
    "Subscriber",
    "TopicDeleted",
    "Unavailable",
    "__version__",
    "connect",
    "connect_async",
]

_HOMES = {
    "AsyncClient": "client.async_client",
    "AsyncConsumer": "client.aio",
    "AsyncProducer": "client.aio",
    "AsyncReader": "client.aio",
    "AsyncSubscriber": "client.async_subscriber",
    "Batch": "client.consume.batch",
    "Client": "client.client",
    "Consumer": "client.consumer",
    "Message": "client.values.message",
    "MessageId": "client.values.message",
    "Producer": "client.producer",
    "Reader": "client.reader",
    "Subscriber": "client.subscriber",
    "connect": "client.entry",
    "connect_async": "client.entry",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
