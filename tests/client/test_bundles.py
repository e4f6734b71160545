"""How many frames go out together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from danube_fast.client.link.buffers import FRAME_AT
from danube_fast.client.link.bundler import Bundler
from danube_fast.client.values.limits import BUNDLE_BYTES_MAX
from danube_fast.frame.bundle import bundle_bytes
from danube_fast.frame.layout import BUNDLE_ENTRY_BYTES, BUNDLE_HEADER_BYTES

FRAME_BYTES = 60_000


class Channel(SimpleNamespace):
    """A connection that keeps the sizes of what it sends."""

    def next_request(self) -> int:
        return len(self.sizes) + 1

    def beat_soon(self) -> None:
        """Nothing beats."""

    def limit(self, name: str, default: int) -> int:
        return self.limits.get(name, default)

    def send_bundle(self, command: bytes, bundle: memoryview) -> None:
        self.sizes.append(len(bundle))


class Sending(SimpleNamespace):
    """A frame, as itself."""

    __hash__ = object.__hash__


def sending() -> Any:
    """A frame of a lane of its own."""
    frame = bytes(FRAME_BYTES)
    lane = SimpleNamespace(partition_id=7, ack_class="fsync")
    buffer = SimpleNamespace(bundle=lambda _, size: memoryview(bytes(bundle_bytes([size]))))
    return Sending(
        lane=lane, frame_bytes=FRAME_BYTES, request=0, frame=lambda: frame, buffer=buffer, frame_at=FRAME_AT
    )  # fmt: skip


def sizes(limits: dict[str, int], frames: int) -> list[int]:
    """Bytes of the bundles that so many frames go out in."""
    pump = SimpleNamespace(arm=lambda *_: None, clock=SimpleNamespace(monotonic_ns=lambda: 0))
    channel: Any = Channel(pump=pump, limits=limits, sizes=[])
    bundler = Bundler(channel)
    bundler.gather()
    for _ in range(frames):
        bundler.send(sending())
    bundler.release()
    return channel.sizes


@pytest.mark.parametrize("limit", [65_536, bundle_bytes([FRAME_BYTES] * 3), 525_312])
def test_a_bundle_fits_the_brokers_limit_with_its_directory(limit):
    sent = sizes({"bundle_bytes_max": limit}, 40)
    each = (limit - BUNDLE_HEADER_BYTES) // (BUNDLE_ENTRY_BYTES + FRAME_BYTES)
    assert max(sent) <= limit
    assert len(sent) == -(-40 // each), "as few as fit"


def test_without_such_a_limit_a_bundle_has_the_clients_own():
    sent = sizes({}, 40)
    assert max(sent) <= BUNDLE_BYTES_MAX
    assert len(sent) == -(-40 // (BUNDLE_BYTES_MAX // FRAME_BYTES))
