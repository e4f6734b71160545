"""Tools for tests of programs that use danube-fast.

    from danube_fast.testing import Broker
    with Broker() as broker, broker.client() as client: ...

The pytest fixtures (`danube_broker`, `danube_topic`, ...) need no import: `plugin.py`. Names are loaded
when first used, so that a test run which uses none of them pays for none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danube_fast.testing.broker import Broker

__all__ = ["Broker"]

_HOMES = {"Broker": "broker"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
