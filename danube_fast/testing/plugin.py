"""Pytest fixtures, found by pytest wherever danube-fast is installed (entry point `pytest11`).

    danube_broker     a Broker for the whole run, started when the first test asks for it
    danube_namespace  a namespace of the test's own, such as "/test-1f0c9a"; deleted with its topics afterwards
    danube_topic      a name in that namespace; the first publish creates the topic

Nothing else is imported until a test uses one of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from danube_fast.testing.broker import Broker

__all__ = ["danube_broker", "danube_namespace", "danube_topic"]


@pytest.fixture(scope="session")
def danube_broker() -> Iterator[Broker]:
    """A real broker in a temporary directory, one for the run; it ends with the run."""
    from danube_fast.testing.broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def danube_namespace(danube_broker: Broker) -> Iterator[str]:
    """A namespace for this test alone, with its slash: f"{danube_namespace}/orders" is a topic."""
    name = f"test-{secrets.token_hex(6)}"
    with danube_broker.client() as client:
        client.admin.create_namespace(name)
    yield f"/{name}"
    with danube_broker.client() as client:
        for topic in client.admin.list_topics(name):
            client.admin.delete_topic(topic["topic"])
        client.admin.delete_namespace(name)


@pytest.fixture
def danube_topic(danube_namespace: str) -> str:
    """The name of a topic for this test alone."""
    return f"{danube_namespace}/topic"
