"""`sessions_per_principal_max`: one user cannot take all the sessions of a process; a client that comes back counts once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import danube_fast
from danube_fast.config import Settings
from danube_fast.errors import ResourceExhausted
from danube_fast.net.greeting import Greeter
from danube_fast.net.protocol import PROTOCOL_VERSION, Error, Hello, Welcome
from danube_fast.net.session import Sessions
from tests.delivery.test_security import SecuredServer

MOST = 3


def greeter(sessions: Sessions, settings: Settings) -> Greeter:
    return Greeter(
        sessions, settings, "host", lambda claims, proof: str(claims["principal"]), sessions.close
    )


def hello(who: str, session: int = 0, token: bytes = b"") -> Hello:
    return Hello(
        request=1, protocol_version=PROTOCOL_VERSION, client_name="c", auth={"principal": who},
        session=session, token=token,
    )  # fmt: skip


@pytest.fixture
def greet() -> Greeter:
    settings = Settings(sessions_per_principal_max=MOST)
    tokens = itertools.count()
    return greeter(Sessions(settings, lambda: b"%16d" % next(tokens)), settings)


def test_one_more_is_refused_and_others_are_not(greet: Greeter) -> None:
    for number in range(MOST):
        assert isinstance(greet.greet(b"\0%d" % number, hello("ann"), 1), Welcome)
    refused = greet.greet(b"\0x", hello("ann"), 1)
    assert isinstance(refused, Error)
    assert refused.code == ResourceExhausted.code
    assert "ann has 3 sessions" in refused.text
    assert "sessions_per_principal_max" in refused.text
    assert isinstance(greet.greet(b"\0y", hello("bob"), 1), Welcome)


def test_a_session_that_is_resumed_counts_once(greet: Greeter) -> None:
    welcomes = [greet.greet(b"\0%d" % number, hello("ann"), 1) for number in range(MOST)]
    for turn, welcome in enumerate(welcomes * 2):
        assert isinstance(welcome, Welcome)
        # from another connection, and then over the same one
        again = greet.greet(b"\1%d" % turn, hello("ann", welcome.session, welcome.token), 2)
        assert isinstance(again, Welcome), again
        same = greet.greet(b"\1%d" % turn, hello("ann", again.session, again.token), 2)
        assert isinstance(same, Welcome), same
        assert same.resumed
        welcomes[turn % MOST] = same
        if turn == MOST - 1:
            break


def test_a_closed_session_frees_its_place() -> None:
    settings = Settings(sessions_per_principal_max=1)
    sessions = Sessions(settings, lambda: b"t")
    for _ in range(3):
        opened = sessions.open(b"\0a", "c", "ann", 1)
        with pytest.raises(ResourceExhausted):
            sessions.open(b"\0b", "c", "ann", 1)
        sessions.close(opened)
        sessions.close(opened)  # twice does not free two places


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecuredServer]:
    secured = SecuredServer(tmp_path / "data", tmp_path, sessions_per_principal_max=MOST)
    with secured:
        secured.make_ann()
        yield secured


def test_a_user_of_a_broker(server: SecuredServer) -> None:
    with server.come_in("ann") as ann:
        server.add(ann.admin, "bob", ("viewer", "/shop/*"))
        with contextlib.ExitStack() as stack:
            for _ in range(MOST):
                stack.enter_context(server.come_in("bob"))
            with pytest.raises(ResourceExhausted, match="sessions_per_principal_max"):
                server.come_in("bob")
        with server.come_in("bob"):
            assert isinstance(ann, danube_fast.Client)
