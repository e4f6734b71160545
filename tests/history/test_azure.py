"""The store in Azure: what every store does, on a server in this process and on Azurite, and what a store on a
network does wrong."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import (
    AlreadyExists,
    DanubeError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from danube_fast.history.stores import azure
from danube_fast.history.stores.opening import open_store
from danube_fast.history.stores.store import ObjectStore
from tests.history.conformance import Conformance, keys, parts_of
from tests.history.fakes import BUCKET, PAGE, AzureFake
from tests.history.faulty_proxy import FaultyProxy
from tests.history.real_servers import ACCOUNT, ACCOUNT_KEY, azurite
from tests.history.s3_servers import free_port

pytestmark = pytest.mark.timeout(120)


def store_url(endpoint: str, prefix: str = "p", container: str = BUCKET) -> str:
    return f"az://{container}/{prefix}?account={ACCOUNT}&endpoint_url={endpoint}/{ACCOUNT}"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of the test alone, and quick second tries."""
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)
    monkeypatch.setattr(azure, "_BACKOFF_MIN_SECONDS", 0.02)
    monkeypatch.setattr(azure, "_BACKOFF_MAX_SECONDS", 0.1)


@pytest.fixture(scope="module")
def fake() -> Iterator[AzureFake]:
    server = AzureFake()
    yield server
    server.close()


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    with azurite() as endpoint:
        yield endpoint


@contextlib.contextmanager
def opened(url: str, scratch: Path) -> Iterator[ObjectStore]:
    store = open_store(url, SystemClock(), scratch / "parts")
    try:
        yield store
    finally:
        store.close()


def a_new_prefix() -> str:
    return f"run-{time.time_ns()}"


class TestFake(Conformance):
    @pytest.fixture
    def store(self, fake: AzureFake, tmp_path: Path) -> Iterator[ObjectStore]:
        with opened(store_url(fake.url, a_new_prefix()), tmp_path) as store:
            yield store


class TestAzurite(Conformance):
    @pytest.fixture
    def store(self, real: str, tmp_path: Path) -> Iterator[ObjectStore]:
        with opened(store_url(real, a_new_prefix()), tmp_path) as store:
            yield store


@pytest.fixture
def proxy(fake: AzureFake) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(fake.url)
    yield proxy
    proxy.close()


@pytest.fixture
def store(proxy: FaultyProxy, tmp_path: Path) -> Iterator[ObjectStore]:
    with opened(store_url(proxy.url, a_new_prefix()), tmp_path) as store:
        yield store


@pytest.mark.parametrize(
    ("status", "code", "expected", "words"),
    [
        (401, "NoAuthenticationInformation", PermissionDenied, "check the credentials"),
        (403, "AuthenticationFailed", PermissionDenied, "clock"),
        (403, "AuthorizationPermissionMismatch", PermissionDenied, "what they allow"),
        (403, "AccountIsDisabled", FailedPrecondition, "enable the account"),
        (404, "BlobNotFound", NotFound, "BlobNotFound"),
        (404, "ContainerNotFound", FailedPrecondition, "make the container"),
        (409, "ContainerBeingDeleted", FailedPrecondition, "make the container"),
        (409, "BlobArchived", FailedPrecondition, "archived"),
        (409, "AccountBeingCreated", Unavailable, "AccountBeingCreated"),
        (400, "InvalidQueryParameterValue", InvalidArgument, "InvalidQueryParameterValue"),
        (416, "InvalidRange", DataLoss, "shorter"),
        (429, "TooManyRequests", Unavailable, "429"),
        (500, "InternalError", Unavailable, "InternalError"),
        (503, "ServerBusy", Unavailable, "ServerBusy"),
        (507, "InsufficientStorage", ResourceExhausted, "make room"),
    ],
)
def test_errors_name_store_key_and_cause(
    store: ObjectStore,
    proxy: FaultyProxy,
    status: int,
    code: str,
    expected: type[DanubeError],
    words: str,
) -> None:
    fault = proxy.fail("GET", "some/key", 99, status=status, code=code)
    with pytest.raises(expected, match=words) as caught:
        store.read("some/key")
    assert type(caught.value) is expected
    assert "some/key" in str(caught.value)
    assert store.url in str(caught.value)
    assert (fault.met > 1) == (status in (429, 500, 503, 507))


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (409, "BlobAlreadyExists", AlreadyExists),
        (412, "ConditionNotMet", AlreadyExists),
        (403, "UnauthorizedBlobOverwrite", AlreadyExists),
        (409, "ContainerBeingDeleted", FailedPrecondition),
        (409, "AccountBeingCreated", Unavailable),
        (404, "", Unavailable),
        (503, "ServerBusy", Unavailable),
    ],
)
def test_a_refused_create(
    store: ObjectStore, proxy: FaultyProxy, status: int, code: str, expected: type[DanubeError]
) -> None:
    """obstore takes each 409 for an object that exists."""
    proxy.fail("PUT", "some/key", 99, status=status, code=code)
    with pytest.raises(expected, match="some/key") as caught:
        store.create("some/key", b"data")
    assert type(caught.value) is expected


def test_a_busy_store_is_asked_again(store: ObjectStore, proxy: FaultyProxy) -> None:
    passing = proxy.fail("PUT", "some/key", 2, status=503, code="ServerBusy")
    store.create("some/key", b"data")
    assert passing.met == 2
    assert store.read("some/key") == b"data"


def test_a_404_that_is_not_the_stores_own_is_no_missing_object(
    store: ObjectStore, proxy: FaultyProxy
) -> None:
    store.create("some/key", b"data")
    proxy.fail("GET", "", 99, status=404, text="<html>not here</html>")
    proxy.fail("HEAD", "", 99, status=404)
    for call in (lambda: store.read("some/key"), lambda: store.head("some/key")):
        with pytest.raises(Unavailable, match="404"):
            call()


def test_a_head_that_is_refused(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.fail("HEAD", "some/key", 99, status=403)
    with pytest.raises(PermissionDenied, match="some/key"):
        store.head("some/key")


def test_lost_answers_are_conflicts_with_oneself(store: ObjectStore, proxy: FaultyProxy) -> None:
    """The second try meets the first one's object: the caller looks whose it is."""
    lost = proxy.fail("PUT", "some/key", loses_answer=True)
    with pytest.raises(AlreadyExists):
        store.create("some/key", b"mine")
    assert lost.met == 1
    assert store.read("some/key") == b"mine"
    upload = store.begin("big")
    parts = parts_of(store, upload, b"one", b"two")
    lost = proxy.fail("PUT", "big", loses_answer=True)
    with pytest.raises(AlreadyExists):
        store.complete(upload, parts)
    assert lost.met == 1
    info = store.head("big")
    assert info is not None
    assert info.size == 6


def test_a_body_that_is_cut_or_slow(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure, "_REQUEST_SECONDS", 0.5)
    with opened(store_url(proxy.url, a_new_prefix()), tmp_path) as store:
        store.create("some/key", bytes(range(250)) * 4)
        once = proxy.fail("GET", "some/key", cut_at=400)
        assert store.read("some/key") == bytes(range(250)) * 4
        assert once.met == 1
        slow = proxy.fail("GET", "some/key", delay_seconds=1.0)
        assert store.read("some/key", 10, 20) == bytes(range(10, 30))
        assert slow.met == 1
        proxy.fail("GET", "some/key", 99, cut_at=0)
        with pytest.raises(Unavailable, match="some/key"):
            store.read("some/key")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with (
        opened(store_url(f"http://127.0.0.1:{free_port()}"), tmp_path) as store,
        pytest.raises(Unavailable, match=r"key.*request"),
    ):
        store.create("some/key", b"data")


def test_a_missing_container_is_not_a_missing_object(fake: AzureFake, tmp_path: Path) -> None:
    with opened(store_url(fake.url, container="none-such"), tmp_path) as store:
        upload = store.begin("parts")
        parts = parts_of(store, upload, b"data")
        for call in (
            lambda: store.create("a", b""),
            lambda: store.read("a"),
            lambda: store.head("a"),
            lambda: list(store.list()),
            lambda: store.complete(upload, parts),
        ):
            with pytest.raises(FailedPrecondition, match="make the container"):
                call()


def test_parts_stay_until_they_are_sent(
    store: ObjectStore, proxy: FaultyProxy, fake: AzureFake, tmp_path: Path
) -> None:
    """A store that fails loses no part, and another process can go on."""
    upload = store.begin("big")
    parts = parts_of(store, upload, b"one", b"two")
    proxy.fail("PUT", "big", 99, status=503, code="ServerBusy")
    with pytest.raises(Unavailable, match="ServerBusy"):
        store.complete(upload, parts)
    proxy.faults.clear()
    with opened(store.url, tmp_path) as another:
        assert [found for found, _ in another.uploads()] == [upload]
        another.complete(upload, parts)
        assert another.read("big") == b"onetwo"


def test_a_reader_needs_no_folder(fake: AzureFake) -> None:
    with opened(store_url(fake.url), Path("/nowhere")) as store:
        store.head("a")
        with pytest.raises(FailedPrecondition, match="/nowhere"):
            store.begin("a")


def test_nothing_secret_is_told(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2023-11-03&sp=r&sig=wonderland")
    with opened(store_url(proxy.url), tmp_path) as store:
        for fault in ({"status": 403}, {"status": 500}, {"loses_answer": True}):
            proxy.faults.clear()
            for method in ("GET", "PUT", "HEAD", "POST"):
                proxy.fail(method, "", 99, **fault)
            calls = (
                lambda: store.read("a"),
                lambda: store.create("a", b""),
                lambda: store.head("a"),
                lambda: list(store.list()),
                lambda: store.delete(["a"]),
            )
            for call in calls:
                with pytest.raises(DanubeError) as caught:
                    call()
                assert "wonderland" not in str(caught.value)
    assert any("sig=wonderland" in path for _, path in proxy.seen)


def test_wrong_credentials(real: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d29uZGVybGFuZA==")
    with (
        opened(store_url(real), tmp_path) as store,
        pytest.raises(PermissionDenied, match="credentials") as caught,
    ):
        store.read("a")
    assert "d29uZGVybGFuZA" not in str(caught.value)


def test_wrong_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for more, words in (
        ("?endpoint_url=localhost:10000", "begins with http"),
        ("?acount=x", "account"),
        ("", "AZURE_STORAGE_ACCOUNT_NAME"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            open_store(f"az://{BUCKET}/p{more}", SystemClock(), tmp_path)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64 !!")
    with pytest.raises(InvalidArgument, match="az://") as caught:
        open_store(f"az://{BUCKET}/p?account=x", SystemClock(), tmp_path)
    assert "not base64" not in str(caught.value)


def test_many_objects_take_several_pages(fake: AzureFake, tmp_path: Path) -> None:
    with opened(store_url(fake.url, a_new_prefix()), tmp_path) as store:
        wanted = [f"n/{number:05d}" for number in range(3 * PAGE + 1)]
        for key in reversed(wanted):
            store.create(key, b"")
        assert keys(store) == wanted
        store.delete(["n/missing", *wanted])
        assert keys(store) == []
