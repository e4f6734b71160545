"""Several keys of a broker: they are tried in turn, and asked for anew where clients sign on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import zmq

import danube_fast
from danube_fast.errors import (
    PermissionDenied,
)
from tests.client.sign_on_site import KEY, OTHER_KEY, Site, fails
from tests.client.test_curve import WAIT_SECONDS


@pytest.mark.parametrize("order", ["old-first", "new-first"])
def test_several_keys_are_tried_in_turn(site: Site, tmp_path: Path, order: str) -> None:
    from danube_fast.security.curve import KeyPair, new_key_pair, write_key_file

    pair: KeyPair = new_key_pair()
    write_key_file(tmp_path / "c.key", pair)
    key = pair.public.encode()
    site.guard.status[key] = b"200"
    new = zmq.curve_keypair()
    keys = [KEY, new[0].decode()]
    options = {
        "server_key": " ".join(keys if order == "old-first" else keys[::-1]),
        "key_file": tmp_path / "c.key",
    }
    with danube_fast.connect(site.broker.url, timeout=WAIT_SECONDS, **options) as client:
        producer = client.producer("/default/t")
        producer.publish(b"1")
        assert client._core._trust.server_keys[0] == KEY, "the key that worked is not tried first"
        site.restart_broker(new)
        site.guard.status[key] = b"200"
        producer.publish(b"2")
        assert client._core._trust.server_keys == (new[0].decode(), KEY)


def test_none_of_several_keys(site: Site, tmp_path: Path) -> None:
    from danube_fast.security.curve import new_key_pair, write_key_file

    write_key_file(tmp_path / "c.key", new_key_pair())
    keys = [OTHER_KEY, zmq.curve_keypair()[0].decode()]
    began = time.monotonic()
    fails(
        lambda: danube_fast.connect(
            site.broker.url, server_key=keys, key_file=tmp_path / "c.key", timeout=WAIT_SECONDS
        ),
        PermissionDenied, "wrong server key",
    )  # fmt: skip
    assert time.monotonic() - began >= 2, "a few failures are no verdict"


@pytest.mark.parametrize("others", [[], [KEY], [OTHER_KEY]], ids=["alone", "and-old", "and-other"])
def test_keys_are_asked_for_when_none_fits(site: Site, others: list[str]) -> None:
    """The broker's key is rotated before a renewal brings it."""
    server = zmq.curve_keypair()
    with site.connect() as client:
        client.publish("/default/t", b"1")
        site.server_keys = [*others, server[0].decode()]
        site.restart_broker(server)
        site.guard.status.update({key.encode(): b"200" for _, key in site.port.asked})
        client.publish("/default/t", b"2")
        assert client._core._trust.server_keys == (server[0].decode(), *others)


def test_a_broker_that_has_none_of_the_keys_of_the_sign_on(site: Site) -> None:
    site.server_keys = [OTHER_KEY]
    fails(site.connect, PermissionDenied, "wrong server key", seconds=30)
