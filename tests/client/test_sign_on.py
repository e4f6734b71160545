"""Sign-on by token: the way in, its arguments, and how it goes on; broker and sign-on port are threads."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

import danube_fast
from danube_fast.client.link.trust import server_keys_of
from danube_fast.client.sign_on import renewal
from danube_fast.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from tests.client.fake_sign_on import refusal, silent
from tests.client.sign_on_site import KEY, NOWHERE, OTHER_KEY, TOKEN, Site, fails
from tests.client.test_curve import WAIT_SECONDS

# ---------------------------------------------------------------- the way in


def test_a_token_is_the_way_in(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with site.connect() as client:
        client.publish("/default/t", b"1")
        text = repr([client, client._core, vars(client._core), client._core._trust.sign_on])
        assert client._core._trust.server_keys == (KEY,)
    assert site.port.asked[0][0] == TOKEN and len(site.port.asked) == 1
    assert TOKEN not in text and TOKEN not in caplog.text
    head = site.port.heads[0].lower()
    assert (
        b"content-type: application/json" in head
        and TOKEN.encode() not in head.partition(b"\r\n")[0]
    )


def test_each_client_draws_a_key_of_its_own(site: Site) -> None:
    with site.connect(), site.connect():
        pass
    keys = [key for _, key in site.port.asked]
    assert len(keys) == len(set(keys)) == 2


def test_a_function_is_asked_for_each_sign_on_in_a_thread_that_may_block(site: Site) -> None:
    threads = []
    site.seconds = 2

    def token() -> str:
        threads.append(threading.current_thread())
        return TOKEN

    with site.connect(token=token) as client:
        site.port.wait_asked(3)
        client.publish("/default/t", b"1")
    assert len({thread.name for thread in threads}) == 1
    assert threads[0] is not threading.main_thread() and threads[0].daemon


def test_the_pinned_fingerprint_is_enough(site: Site) -> None:
    with site.connect(tls=site.pem.fingerprint) as client:
        client.publish("/default/t", b"1")


def test_a_server_key_that_is_given_must_be_among_those_of_the_sign_on(site: Site) -> None:
    with site.connect(server_key=[OTHER_KEY, KEY]):
        pass
    fails(lambda: site.connect(server_key=OTHER_KEY), PermissionDenied, "other keys of the broker")


def test_an_asynchronous_client_signs_on_beside_the_loop(site: Site) -> None:
    may_answer = threading.Event()

    def token() -> str:
        assert may_answer.wait(WAIT_SECONDS), "the loop stands still"
        return TOKEN

    async def main() -> None:
        opening = asyncio.ensure_future(
            danube_fast.connect_async(**{**site.options, "token": token})
        )
        turns = 0
        while turns < 50:  # the loop turns while the function blocks
            await asyncio.sleep(0)
            turns += 1
        assert not opening.done()
        may_answer.set()
        client = await opening
        await client.publish("/default/t", b"1")
        await client.close()

    asyncio.run(main())


# ---------------------------------------------------------------- arguments


ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("token-alone", {"sign_on": None, "tls": None}, "sign_on='https://HOST:PORT'"),
    ("tls-alone", {"token": None, "sign_on": None}, "sign_on='https://HOST:PORT'"),
    ("no-token", {"token": None}, "needs token="),
    ("http", {"sign_on": "http://127.0.0.1:1"}, "secrets need https"),
    ("no-scheme", {"sign_on": "127.0.0.1:1"}, "write https://HOST:PORT"),
    ("no-host", {"sign_on": "https://:1"}, "write https://HOST:PORT"),
    ("no-port", {"sign_on": "https://h:x"}, "write https://HOST:PORT"),
    ("high-port", {"sign_on": "https://h:65536"}, "write https://HOST:PORT"),
    ("bytes", {"sign_on": b"https://h:1"}, "write https://HOST:PORT"),
    ("user", {"sign_on": f"https://{TOKEN}@h:1"}, "host alone"),
    ("query", {"sign_on": f"https://h:1/?token={TOKEN}"}, "host alone"),
    ("path", {"sign_on": f"https://h:1/{TOKEN}"}, "host alone"),
    ("line-end", {"sign_on": "https://h:1/\r\nX: y"}, "write https://HOST:PORT"),
    ("empty", {"token": ""}, "without blanks"),
    ("blank", {"token": f"{TOKEN}\n"}, "without blanks"),
    ("header", {"token": f"x\r\nX-Admin: {TOKEN}"}, "without blanks"),
    ("umlaut", {"token": "\u00e4" + TOKEN}, "without blanks"),
    ("long", {"token": TOKEN * 400}, "without blanks"),
    ("number", {"token": 5}, "of type int"),
    ("tls-number", {"tls": 5}, "tls= is the path"),
    ("tls-empty", {"tls": ""}, "tls= is the path"),
    ("two-ways", {"key_file": "x"}, "two ways in"),
    ("wrong-key", {"server_key": TOKEN}, "40 characters of Z85"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "text"), [row[1:] for row in ARGUMENTS], ids=[row[0] for row in ARGUMENTS])  # fmt: skip
def test_arguments_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    given = {"token": TOKEN, "sign_on": "https://127.0.0.1:1", "tls": "ca.pem", **options}
    fails(lambda: danube_fast.connect(NOWHERE, timeout=0.01, **given), InvalidArgument, text)


def test_server_keys_are_one_or_several() -> None:
    for given in (f"{KEY} {OTHER_KEY}", f"{KEY},{OTHER_KEY}\n", [KEY, OTHER_KEY, KEY], (KEY, OTHER_KEY)):  # fmt: skip
        assert server_keys_of(given) == (KEY, OTHER_KEY)
    assert server_keys_of(KEY) == (KEY,)
    for wrong in ("", " , ", [], [5], [KEY, b"x"], [KEY, "x"], {KEY: 1}, [zmq.curve_keypair()[0].decode() for _ in range(9)]):  # fmt: skip
        with pytest.raises(InvalidArgument):
            server_keys_of(wrong)


def test_functions_that_return_no_token(site: Site) -> None:
    async def coroutine() -> str:
        return TOKEN

    def broken() -> str:
        raise LookupError("the vault is shut")

    def coroutine_fails() -> None:
        fails(lambda: site.connect(token=coroutine), InvalidArgument, "of type coroutine")
        gc.collect()

    def denied() -> str:
        raise PermissionDenied("the vault says no; ask for the right")

    def ends() -> str:
        raise SystemExit(3)

    fails(lambda: site.connect(token=lambda: None), InvalidArgument, "of type NoneType")
    fails(lambda: site.connect(token=lambda: "a b"), InvalidArgument, "without blanks")
    with pytest.warns(RuntimeWarning, match="never awaited"):
        coroutine_fails()
    error = fails(lambda: site.connect(token=broken), FailedPrecondition, "raised LookupError")
    assert isinstance(error.__cause__, LookupError)
    fails(lambda: site.connect(token=denied), PermissionDenied, "the vault says no")
    fails(lambda: site.connect(token=ends), FailedPrecondition, "raised SystemExit")
    assert not site.port.asked


# ---------------------------------------------------------------- as time goes on


def denied_at_last(call: Callable[[], Any]) -> str:
    """Call until it is refused; the text of that."""
    limit = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < limit:
        try:
            call()
        except PermissionDenied as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("no refusal came")


def test_renewal_keeps_the_session(site: Site) -> None:
    site.seconds = 2
    with site.connect() as client:
        producer = client.producer("/default/t")
        producer.publish(b"1")
        hellos = site.broker.hellos
        site.port.wait_asked(4)
        producer.publish(b"2")
        assert site.broker.hellos == hellos, "a renewal has reconnected"
    assert len({key for _, key in site.port.asked}) == 1


def test_a_refused_renewal_ends_the_client(site: Site) -> None:
    site.seconds = 2
    with site.connect() as client:
        producer = client.producer("/default/t")
        producer.publish(b"1")
        site.tokens.clear()
        text = denied_at_last(lambda: producer.publish(b"2"))
        assert "refuses the sign-on: no such key" in text
        with pytest.raises(PermissionDenied, match="no such key"):
            client.admin.create_topic("/default/u")
        with pytest.raises(PermissionDenied, match="no such key"):
            client.producer("/default/v")


def test_a_renewal_that_fails_for_a_while_is_asked_for_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.seconds = 3
    with site.connect() as client:
        producer = client.producer("/default/t")
        site.refusals += [refusal(503, "Unavailable", "busy")] * 2
        site.port.wait_asked(4)
        producer.publish(b"1")
    assert "not renewed yet" in caplog.text and TOKEN not in caplog.text


def test_a_broker_that_has_forgotten_the_sign_on(site: Site) -> None:
    with site.connect() as client:
        producer = client.producer("/default/t")
        assert producer.publish(b"1").offset == 0
        site.restart_broker()
        producer.publish(b"2")
        assert site.broker.hellos
        assert len(site.port.asked) == 2
        assert (
            client._core._trust.sign_on is not None and client._core._trust.sign_on.generation == 2
        )
    assert len({key for _, key in site.port.asked}) == 1


def test_a_worker_that_hears_of_the_sign_on_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusals just behind a sign-on are no reason for another."""
    monkeypatch.setattr(renewal, "KEY_SETTLE_NS", 60 * 10**9)
    site.guard.status = Forgetful()
    opened: list[danube_fast.Client] = []
    thread = threading.Thread(target=lambda: opened.append(site.connect()), daemon=True)
    thread.start()
    site.broker.wait("some refusals", lambda: site.guard.asked >= 3)
    site.guard.status = {site.port.asked[0][1].encode(): b"200"}
    thread.join(WAIT_SECONDS)
    assert opened, "the client does not ask again"
    opened[0].close()
    assert len(site.port.asked) == 1, "a client that was signed on has signed on anew"


def test_a_broker_that_never_hears_of_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the sign-on port is another broker's."""
    monkeypatch.setattr(renewal, "KEY_SETTLE_NS", 0)
    monkeypatch.setattr(renewal, "SIGN_ON_PAUSE_NS", 0)
    site.guard.status = Forgetful()
    fails(
        site.connect,
        PermissionDenied,
        "signs this client on, and yet",
        "not registered",
        seconds=45,
    )
    assert 2 <= len(site.port.asked) <= 1 + renewal.SIGN_ON_ANEW_MAX


class Forgetful(dict[Any, Any]):
    """Registers nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def test_another_principal_is_another_client(site: Site) -> None:
    site.seconds = 2
    with site.connect() as client:
        site.principal = "bob"
        text = denied_at_last(lambda: client.publish("/default/t", b"2"))
        assert "stands for 'bob'" in text


# ---------------------------------------------------------------- ends


def test_a_client_that_is_closed_leaves_no_thread(site: Site) -> None:
    client = site.connect()
    sign_on = client._core._trust.sign_on
    assert sign_on is not None and sign_on._thread.is_alive()
    client.close()
    assert not sign_on._thread.is_alive()


def test_a_sign_on_that_is_under_way_ends_with_the_client(site: Site) -> None:
    site.port.serve = silent
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"has not answered the sign-on within 0\.5 s") as found:
        site.connect(timeout=0.5)
    assert site.port.url in str(found.value) and "danube-fast serve" not in str(found.value)
    assert time.monotonic() - began < 5, "close() waits for the sign-on"
    assert not [each for each in threading.enumerate() if each.name == "danube-sign-on"]


def test_a_token_that_does_not_come_is_named(site: Site) -> None:
    over = threading.Event()
    try:
        with pytest.raises(
            Unavailable, match=r"function token= has returned nothing within 0\.5 s"
        ):
            site.connect(timeout=0.5, token=lambda: str(over.wait(WAIT_SECONDS)))
    finally:
        over.set()
    assert not site.port.asked


def test_a_child_signs_on_with_a_key_of_its_own(site: Site) -> None:
    with site.connect() as client:
        client.publish("/default/t", b"1")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                client.close()
                with site.connect() as own:
                    own.publish("/default/t", b"2")
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        client.publish("/default/t", b"3")
    keys = [key for _, key in site.port.asked]
    assert len(keys) == len(set(keys)) == 2
