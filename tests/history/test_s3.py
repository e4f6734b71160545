"""The store in S3: what every store does, on moto and on SeaweedFS, and what a store on a network does wrong."""

from __future__ import annotations

import contextlib
import logging
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
from danube_fast.history.stores import s3
from danube_fast.history.stores.opening import open_store
from danube_fast.history.stores.s3 import S3Store
from danube_fast.history.stores.store import ObjectStore
from tests.history.conformance import Conformance, keys, parts_of
from tests.history.faulty_proxy import FaultyProxy
from tests.history.s3_servers import (
    ACCESS_KEY,
    BUCKET,
    SECRET_KEY,
    free_port,
    moto_server,
    plain_client,
    seaweed_server,
)

pytestmark = pytest.mark.timeout(120)
SCRATCH = Path("/nowhere")


def store_url(endpoint: str, prefix: str = "p", more: str = "") -> str:
    return f"s3://{BUCKET}/{prefix}?endpoint_url={endpoint}&region=us-east-1&path_style=true{more}"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials of the test alone, and quick second tries."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as endpoint:
        plain_client(endpoint).create_bucket(Bucket=BUCKET)
        yield endpoint


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed_server(tmp_path_factory.mktemp("seaweed")) as endpoint:
        plain_client(endpoint).create_bucket(Bucket=BUCKET)
        yield endpoint


@contextlib.contextmanager
def opened(url: str) -> Iterator[ObjectStore]:
    store = open_store(url, SystemClock(), SCRATCH)
    try:
        yield store
    finally:
        store.close()


def a_new_prefix() -> str:
    return f"run-{time.time_ns()}"


class TestMoto(Conformance):
    ended = (NotFound, Unavailable)  # it answers 500 for a part of an upload that was aborted
    knows_begin = False  # all of its uploads began in 2010

    @pytest.fixture
    def store(self, moto: str) -> Iterator[ObjectStore]:
        with opened(store_url(moto, a_new_prefix())) as store:
            yield store


class TestSeaweed(Conformance):
    @pytest.fixture
    def store(self, seaweed: str) -> Iterator[ObjectStore]:
        with opened(store_url(seaweed, a_new_prefix())) as store:
            yield store


@pytest.fixture
def proxy(moto: str) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(moto)
    yield proxy
    proxy.close()


@pytest.fixture
def store(proxy: FaultyProxy) -> Iterator[ObjectStore]:
    with opened(store_url(proxy.url, a_new_prefix())) as store:
        yield store


# ---------------------------------------------------------------- answers that are errors


@pytest.mark.parametrize(
    ("status", "code", "expected", "words"),
    [
        (403, "AccessDenied", PermissionDenied, "AccessDenied"),
        (403, "InvalidAccessKeyId", PermissionDenied, "check the credentials"),
        (403, "SignatureDoesNotMatch", PermissionDenied, "check the credentials"),
        (403, "RequestTimeTooSkewed", FailedPrecondition, "set the clock"),
        (403, "InvalidObjectState", FailedPrecondition, "archive"),
        (404, "NoSuchBucket", FailedPrecondition, "make the bucket"),
        (404, "NoSuchKey", NotFound, "NoSuchKey"),
        (400, "AuthorizationHeaderMalformed", FailedPrecondition, "region"),
        (400, "EntityTooSmall", InvalidArgument, "EntityTooSmall"),
        (416, "InvalidRange", DataLoss, "shorter"),
        (501, "NotImplemented", FailedPrecondition, "conditional"),
        (507, "XMinioStorageFull", ResourceExhausted, "make room"),
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
    proxy.fail("GET", "some/key", 9, status=status, code=code)
    with pytest.raises(expected, match=words) as caught:
        store.read("some/key")
    assert type(caught.value) is expected
    assert "some/key" in str(caught.value)
    assert store.url in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "SlowDown"),
        (503, "ServiceUnavailable"),
    ],
)
def test_a_busy_store_is_asked_again_and_then_is_unavailable(
    store: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    store.create("some/key", b"data")
    passing = proxy.fail("GET", "some/key", 1, status=status, code=code)
    assert store.read("some/key") == b"data"
    assert passing.met == 1
    lasting = proxy.fail("GET", "some/key", 99, status=status, code=code)
    with pytest.raises(Unavailable, match=code):
        store.read("some/key")
    assert 2 <= lasting.met <= 8


def test_a_404_that_is_not_the_stores_own_is_no_missing_object(
    store: ObjectStore, proxy: FaultyProxy
) -> None:
    """Of a load balancer, for example: a manifest must not end there."""
    store.create("some/key", b"data")
    proxy.fail("GET", "some/key", 99, status=404, code="")
    with pytest.raises(Unavailable, match="404"):
        store.read("some/key")


def test_a_head_finds_out_why_it_was_refused(store: ObjectStore, proxy: FaultyProxy) -> None:
    """The answer to a HEAD has no body; it may be an expired token."""
    store.create("some/key", b"data")
    expired = proxy.fail("HEAD", "some/key", 1, status=400, code="ExpiredToken")
    info = store.head("some/key")
    assert expired.met == 1
    assert info is not None
    assert info.size == 4
    proxy.fail("HEAD", "some/key", 99, status=403, code="AccessDenied")
    with pytest.raises(PermissionDenied, match="some/key"):
        store.head("some/key")


@pytest.mark.parametrize("code", ["ThrottlingException", "RequestTimeout", "IncompleteBody"])
def test_what_passes_is_unavailable(store: ObjectStore, proxy: FaultyProxy, code: str) -> None:
    proxy.fail("GET", "some/key", 99, status=400, code=code)
    with pytest.raises(Unavailable, match=code):
        store.read("some/key")


def test_a_412_is_somebody_elses_object(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.fail("PUT", "some/key", status=412, code="PreconditionFailed")
    with pytest.raises(AlreadyExists, match="some/key"):
        store.create("some/key", b"data")


def test_a_lost_answer_of_a_create_is_a_conflict_with_oneself(
    store: ObjectStore, proxy: FaultyProxy
) -> None:
    """The second try meets the first one's object: the caller looks whose it is."""
    lost = proxy.fail("PUT", "some/key", loses_answer=True)
    with pytest.raises(AlreadyExists):
        store.create("some/key", b"mine")
    assert lost.met == 1
    assert store.read("some/key") == b"mine"


def test_a_lost_answer_of_complete_is_settled_by_head(
    store: ObjectStore, proxy: FaultyProxy
) -> None:
    upload = store.begin("big")
    parts = parts_of(store, upload, b"data")
    lost = proxy.fail("POST", "uploadId", loses_answer=True)
    with contextlib.suppress(NotFound, AlreadyExists):
        store.complete(upload, parts)
    assert lost.met == 1
    assert proxy.count("POST", "uploadId") == 2
    info = store.head("big")
    assert info is not None
    assert info.size == 4


def test_a_body_that_is_cut_or_slow(
    store: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("some/key", b"x" * 1000)
    proxy.fail("GET", "some/key", 99, cut_at=400)
    with pytest.raises(Unavailable, match="some/key"):
        store.read("some/key")
    proxy.faults.clear()
    assert store.read("some/key") == b"x" * 1000
    monkeypatch.setattr(s3, "_READ_SECONDS", 0.2)
    store.close()
    slow = proxy.fail("GET", "some/key", 1, delay_seconds=1.0)
    assert store.read("some/key") == b"x" * 1000
    assert slow.met == 1


def test_a_server_that_is_not_there() -> None:
    with (
        opened(store_url(f"http://127.0.0.1:{free_port()}")) as store,
        pytest.raises(Unavailable, match="onnect"),
    ):
        store.create("some/key", b"data")


# ---------------------------------------------------------------- buckets and credentials


@pytest.mark.parametrize("server", ["moto", "seaweed"])
def test_a_missing_bucket_is_not_a_missing_object(
    server: str, request: pytest.FixtureRequest
) -> None:
    endpoint = request.getfixturevalue(server)
    url = f"s3://no-such-bucket/p?endpoint_url={endpoint}&region=us-east-1&path_style=true"
    with opened(url) as store:
        calls = [
            lambda: store.read("a"),
            lambda: store.head("a"),
            lambda: list(store.list()),
        ]
        if server == "moto":  # SeaweedFS makes the bucket for its administrator
            calls += [lambda: store.create("a", b""), lambda: store.begin("a")]
        for call in calls:
            with pytest.raises(FailedPrecondition, match="make the bucket"):
                call()


def test_wrong_credentials(seaweed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with (
        opened(store_url(seaweed)) as store,
        pytest.raises(PermissionDenied, match="SignatureDoesNotMatch") as caught,
    ):
        store.read("a")
    assert SECRET_KEY not in str(caught.value)
    assert "wrong" not in str(caught.value)


def test_no_credentials(seaweed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with (
        opened(store_url(seaweed)) as store,
        pytest.raises(PermissionDenied, match=r"in the environment or in ~/\.aws"),
    ):
        store.read("a")


def test_credentials_that_expire_in_the_middle_are_read_again(
    store: ObjectStore, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = store.begin("big")
    expired = proxy.fail("PUT", "partNumber", status=400, code="ExpiredToken")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-newer-key")
    parts = parts_of(store, upload, b"data")
    store.complete(upload, parts)
    assert expired.met == 1
    assert store.read("big") == b"data"
    lasting = proxy.fail("GET", "big", 99, status=400, code="ExpiredToken")
    with pytest.raises(PermissionDenied, match="have expired; renew them"):
        store.read("big")
    assert lasting.met == 2


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_credentials_that_were_replaced_are_read_again(
    seaweed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    """A store that is open goes on with what stands in the file by now."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file, prefix = tmp_path / "credentials", a_new_prefix()
    entry = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    wrong = (ACCESS_KEY, "wrong") if code == "SignatureDoesNotMatch" else ("wrong", SECRET_KEY)
    file.write_text(entry.format(*wrong))
    with opened(store_url(seaweed)) as store:
        with pytest.raises(PermissionDenied, match=code):
            store.create(f"{prefix}/a", b"data")
        file.write_text(entry.format(ACCESS_KEY, SECRET_KEY))
        store.create(f"{prefix}/a", b"data")
        assert store.read(f"{prefix}/a") == b"data"


def test_nothing_secret_is_logged(
    seaweed: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the level that the broker logs, whatever goes wrong."""
    caplog.set_level(logging.INFO)
    with opened(store_url(seaweed)) as store:
        store.create(f"{a_new_prefix()}/a", b"data")
        with contextlib.suppress(DanubeError):
            store.read("missing")
    output = capfd.readouterr()
    text = caplog.text + output.out + output.err
    assert SECRET_KEY not in text
    assert ACCESS_KEY not in text


# ---------------------------------------------------------------- options


def test_encryption_is_asked_for(moto: str) -> None:
    client = plain_client(moto)
    for more, expected in (
        ("&sse=AES256", ("AES256", None)),
        ("&sse=aws:kms&sse_kms_key_id=a-key", ("aws:kms", "a-key")),
    ):
        prefix = a_new_prefix()
        with opened(store_url(moto, prefix, more)) as store:
            store.create("one", b"data")
            upload = store.begin("parts")
            store.complete(upload, parts_of(store, upload, b"data"))
        for key in ("one", "parts"):
            found = client.head_object(Bucket=BUCKET, Key=f"{prefix}/{key}")
            assert (found.get("ServerSideEncryption"), found.get("SSEKMSKeyId")) == expected


def test_a_deleted_version_is_told(store: ObjectStore, proxy: FaultyProxy) -> None:
    """As AWS answers for a key with a delete marker; moto leaves the header out."""
    headers = {"x-amz-delete-marker": "true"}
    proxy.fail("GET", "some/key", status=404, code="NoSuchKey", headers=headers)
    with pytest.raises(NotFound, match="remove the delete marker"):
        store.read("some/key")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("?sse=rot13", "AES256 or aws:kms"),
        ("?endpoint_url=localhost:9000", "begins with http"),
        ("?path_stile=true", "path_style"),
        ("?path_style=perhaps", "path_style|bool"),
    ],
)
def test_wrong_parameters(more: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        open_store(f"s3://{BUCKET}/p{more}", SystemClock(), SCRATCH)


def test_prefixes_do_not_see_each_other(moto: str) -> None:
    run = a_new_prefix()
    with (
        opened(store_url(moto, f"{run}/a")) as one,
        opened(store_url(moto, f"{run}/ab")) as two,
        opened(store_url(moto, "")) as all_of_it,
    ):
        one.create("k", b"one")
        two.create("k", b"two")
        assert keys(one) == keys(two) == ["k"]
        assert one.read("k") == b"one"
        assert [key for key in keys(all_of_it) if key.startswith(run)] == [
            f"{run}/a/k",
            f"{run}/ab/k",
        ]


def test_many_objects_take_several_pages(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(store_url(moto, a_new_prefix())) as store:
        assert isinstance(store, S3Store)
        wanted = [f"n/{number:05d}" for number in range(1003)]
        for key in wanted:
            store.create(key, b"")
        assert keys(store) == wanted
        store.delete(wanted)
        assert keys(store) == []
