"""The store in Google's cloud: what every store does, on a server in this process and on fake-gcs-server, and
what a store on a network does wrong."""

from __future__ import annotations

import contextlib
import gc
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
from danube_fast.history.stores import gcs
from danube_fast.history.stores.opening import open_store
from danube_fast.history.stores.store import ObjectStore, Part, Upload
from tests.history.conformance import Conformance, keys, parts_of
from tests.history.fakes import BUCKET, PAGE, GcsFake, fault_text
from tests.history.faulty_proxy import FaultyProxy
from tests.history.real_servers import fake_gcs_server
from tests.history.s3_servers import free_port

pytestmark = [
    pytest.mark.timeout(120),
    # Google's library leaves the answers open that it does not want
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
LARGE_BYTES = 9 * 1024 * 1024
"""What Google's library sends by a resumable upload."""


def store_url(endpoint: str, prefix: str = "p", bucket: str = BUCKET) -> str:
    return f"gs://{bucket}/{prefix}?endpoint_url={endpoint}"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No credentials but the test's, and quick second tries."""
    for name in list(os.environ):
        if name.startswith(("GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    monkeypatch.setattr(gcs, "_RETRY_SECONDS", 1.0)
    monkeypatch.setattr(gcs, "_BACKOFF_MIN_SECONDS", 0.02)
    monkeypatch.setattr(gcs, "_BACKOFF_MAX_SECONDS", 0.2)
    monkeypatch.setattr(gcs, "_CHUNK_BYTES", 4 * 1024 * 1024)
    yield
    gc.collect()  # here, where open answers are forgiven, and not in another test


@pytest.fixture(scope="module")
def fake() -> Iterator[GcsFake]:
    server = GcsFake()
    yield server
    server.close()


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    with fake_gcs_server() as endpoint:
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
    def store(self, fake: GcsFake, tmp_path: Path) -> Iterator[ObjectStore]:
        with opened(store_url(fake.url, a_new_prefix()), tmp_path) as store:
            yield store


class TestFakeGcsServer(Conformance):
    """Objects here are small: this server forgets the condition of a resumable upload."""

    @pytest.fixture
    def store(self, real: str, tmp_path: Path) -> Iterator[ObjectStore]:
        with opened(store_url(real, a_new_prefix()), tmp_path) as store:
            yield store


@pytest.fixture
def proxy(fake: GcsFake) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(fake.url)
    yield proxy
    proxy.close()


@pytest.fixture
def store(proxy: FaultyProxy, tmp_path: Path) -> Iterator[ObjectStore]:
    with opened(store_url(proxy.url, a_new_prefix()), tmp_path) as store:
        yield store


def a_large_one(store: ObjectStore) -> tuple[bytes, Upload, list[Part]]:
    data = os.urandom(LARGE_BYTES)
    upload = store.begin("big")
    half = LARGE_BYTES // 2
    return (
        data,
        upload,
        [store.put_part(upload, 1, 0, data[:half]), store.put_part(upload, 2, half, data[half:])],
    )


@pytest.mark.parametrize(
    ("status", "reason", "expected", "words"),
    [
        (400, "invalid", InvalidArgument, "invalid"),
        (401, "authError", PermissionDenied, "credentials"),
        (403, "forbidden", PermissionDenied, "what they allow"),
        (403, "rateLimitExceeded", Unavailable, "rateLimitExceeded"),
        (403, "UserProjectAccountProblem", FailedPrecondition, "billing"),
        (409, "conflict", Unavailable, "conflict"),
        (416, "requestedRangeNotSatisfiable", DataLoss, "shorter"),
        (429, "rateLimitExceeded", Unavailable, "429"),
        (500, "backendError", Unavailable, "backendError"),
        (503, "backendError", Unavailable, "503"),
        (507, "full", ResourceExhausted, "make room"),
    ],
)
def test_errors_name_store_key_and_cause(
    store: ObjectStore,
    proxy: FaultyProxy,
    status: int,
    reason: str,
    expected: type[DanubeError],
    words: str,
) -> None:
    fault = proxy.fail("GET", "some%2Fkey", 999, status=status, text=fault_text(status, reason))
    for call in (lambda: store.read("some/key"), lambda: store.head("some/key")):
        with pytest.raises(expected, match=words) as caught:
            call()
        assert type(caught.value) is expected
        assert "some/key" in str(caught.value)
        assert store.url in str(caught.value)
    assert (fault.met > 2) == (status in (429, 500, 503))


@pytest.mark.parametrize(
    ("status", "expected"),
    [(412, AlreadyExists), (409, Unavailable), (404, Unavailable), (503, Unavailable)],
)
def test_a_refused_create(
    store: ObjectStore, proxy: FaultyProxy, status: int, expected: type[DanubeError]
) -> None:
    proxy.fail("POST", "/upload/", 999, status=status, text=fault_text(status, "as planned"))
    with pytest.raises(expected, match="some/key") as caught:
        store.create("some/key", b"data")
    assert type(caught.value) is expected


def test_a_busy_store_is_asked_again(store: ObjectStore, proxy: FaultyProxy) -> None:
    passing = proxy.fail("POST", "/upload/", 2, status=503)
    store.create("some/key", b"data")
    assert passing.met == 2
    assert store.read("some/key") == b"data"


def test_a_404_that_is_not_the_stores_own_is_no_missing_object(
    store: ObjectStore, proxy: FaultyProxy
) -> None:
    store.create("some/key", b"data")
    calls = (lambda: store.read("some/key"), lambda: store.head("some/key"))
    proxy.fail("GET", "some%2Fkey", 99, status=404, text="<html>not here</html>")
    for call in calls:
        with pytest.raises(Unavailable, match="404"):
            call()
    proxy.fail("GET", "", 99, status=404, text="<html>not here</html>")
    for call in (*calls, lambda: list(store.list())):
        with pytest.raises(Unavailable, match="404"):
            call()


def test_lost_answers_are_conflicts_with_oneself(store: ObjectStore, proxy: FaultyProxy) -> None:
    """The second try meets the first one's object: the caller looks whose it is."""
    lost = proxy.fail("POST", "/upload/", loses_answer=True)
    with pytest.raises(AlreadyExists):
        store.create("some/key", b"mine")
    assert lost.met == 1
    assert store.read("some/key") == b"mine"


def test_a_large_object_goes_in_chunks(store: ObjectStore, proxy: FaultyProxy) -> None:
    data, upload, parts = a_large_one(store)
    fault = proxy.fail("PUT", "upload_id", 1, status=503)
    lost = proxy.fail("PUT", "upload_id", 1, loses_answer=True)
    store.complete(upload, parts)
    assert (fault.met, lost.met) == (1, 1)
    assert proxy.count("PUT", "upload_id") > 3
    assert store.read("big") == data
    assert store.read("big", LARGE_BYTES - 5) == data[-5:]
    assert list(store.uploads()) == []


def test_a_large_object_replaces_none(store: ObjectStore, proxy: FaultyProxy) -> None:
    _, upload, parts = a_large_one(store)
    store.create("big", b"early")
    with pytest.raises(AlreadyExists, match="big"):
        store.complete(upload, parts)
    assert proxy.count("PUT", "upload_id") >= 1
    assert store.read("big") == b"early"


def test_the_url_of_a_resumable_upload_is_not_told(store: ObjectStore, proxy: FaultyProxy) -> None:
    """It needs no other credentials."""
    _, upload, parts = a_large_one(store)
    for fault in ({"status": 403}, {"status": 503}, {"loses_answer": True}, {"status": 410}):
        proxy.faults.clear()
        proxy.fail("PUT", "upload_id", 999, **fault)
        with pytest.raises(DanubeError) as caught:
            store.complete(upload, parts)
        assert "session-" not in str(caught.value)
    assert any("session-" in path for _, path in proxy.seen)


def test_a_body_that_is_cut_or_slow(
    store: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(250)) * 4
    store.create("some/key", data)
    once = proxy.fail("GET", "some%2Fkey", cut_at=400)
    assert store.read("some/key") == data
    assert once.met == 1
    monkeypatch.setattr(gcs, "_READ_SECONDS", 0.2)
    slow = proxy.fail("GET", "some%2Fkey", delay_seconds=0.5)
    assert store.read("some/key", 10, 20) == data[10:30]
    assert slow.met == 1
    proxy.fail("GET", "some%2Fkey", 999, cut_at=0)
    with pytest.raises(Unavailable, match="some/key"):
        store.read("some/key")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with (
        opened(store_url(f"http://127.0.0.1:{free_port()}"), tmp_path) as store,
        pytest.raises(Unavailable, match="onnect"),
    ):
        store.create("some/key", b"data")


@pytest.mark.parametrize("server", ["fake", "real"])
def test_a_missing_bucket_is_not_a_missing_object(
    server: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found = request.getfixturevalue(server)
    endpoint = found if server == "real" else found.url
    with opened(store_url(endpoint, bucket="none-such"), tmp_path) as store:
        upload = store.begin("parts")
        parts = parts_of(store, upload, b"data")
        for call in (
            lambda: store.create("a", b""),
            lambda: store.read("a"),
            lambda: store.head("a"),
            lambda: list(store.list()),
            lambda: store.complete(upload, parts),
        ):
            with pytest.raises(FailedPrecondition, match="make the bucket"):
                call()


def test_parts_stay_until_they_are_sent(
    store: ObjectStore, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """A store that fails loses no part, and another process can go on."""
    upload = store.begin("big")
    parts = parts_of(store, upload, b"one", b"two")
    proxy.fail("POST", "/upload/", 999, status=503)
    with pytest.raises(Unavailable, match="503"):
        store.complete(upload, parts)
    proxy.faults.clear()
    with opened(store.url, tmp_path) as another:
        assert [found for found, _ in another.uploads()] == [upload]
        another.complete(upload, parts)
        assert another.read("big") == b"onetwo"


def test_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with (
        opened(f"gs://{BUCKET}/p", tmp_path) as store,
        pytest.raises(PermissionDenied, match="GOOGLE_APPLICATION_CREDENTIALS"),
    ):
        store.read("a")


def test_wrong_parameters(tmp_path: Path) -> None:
    for more, words in (("?endpoint_url=localhost:4443", "begins with http"), ("?x=y", "endpoint")):
        with pytest.raises(InvalidArgument, match=words):
            open_store(f"gs://{BUCKET}/p{more}", SystemClock(), tmp_path)


def test_many_objects_take_several_pages(fake: GcsFake, tmp_path: Path) -> None:
    with opened(store_url(fake.url, a_new_prefix()), tmp_path) as store:
        wanted = [f"n/{number:05d}" for number in range(3 * PAGE + 1)]
        for key in reversed(wanted):
            store.create(key, b"")
        assert keys(store) == wanted
        store.delete(["n/missing", *wanted])
        assert keys(store) == []
        with pytest.raises(NotFound, match="n/00000"):
            store.read("n/00000")
