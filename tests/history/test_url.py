"""URLs of stores: what they open, and what they refuse with which words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from danube_fast.clock import SystemClock
from danube_fast.errors import FailedPrecondition, InvalidArgument
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.memory import MemoryStore
from danube_fast.history.stores.opening import open_store
from danube_fast.history.stores.probe import probe_store
from danube_fast.history.stores.store import Part, Upload
from danube_fast.history.stores.url import parse_store_url
from tests.history.conformance import keys

CLOCK = SystemClock()
SCRATCH = Path("/nowhere")

PLUGIN = """
from danube_fast.history.stores.memory import MemoryStore

def open_it(url, clock, scratch):
    if url.place == "broken":
        raise RuntimeError("no such place")
    store = MemoryStore(clock)
    store.url = f"{url.text} by a plugin"
    return store

not_callable = 7
"""


def test_built_in_stores(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/st%20ore", CLOCK, SCRATCH)
    assert isinstance(store, LocalStore)
    assert store.directory == tmp_path / "st ore"
    assert isinstance(open_store("memory://", CLOCK, SCRATCH), MemoryStore)


def test_parts_of_a_url() -> None:
    url = parse_store_url("s3://bucket/a/b/?region=eu-west-1&path_style=true")
    assert url[1:] == ("s3", "bucket", "a/b/", {"region": "eu-west-1", "path_style": "true"})
    assert parse_store_url("gs://bucket").prefix == ""
    assert parse_store_url("s3://bucket/").prefix == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not the URL of a store"),
        ("bucket/prefix", "is not the URL of a store"),
        ("s3:bucket", "is not the URL of a store"),
        ("s3://bucket/x#y", "is not the URL of a store"),
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket/a//b", "not a key"),
        ("s3://bucket/ä", "not a key"),
        ("s3://bucket/..", "not a key"),
        ("file://", "is not a folder"),
        ("file:///", "is not a folder"),
        ("file://relative/folder", "is not a folder"),
        ("file:///folder?x=y", "is not a folder"),
        ("memory://name", "takes nothing behind it"),
        (
            "ftp://host/x",
            "there is no store ftp://; there are file://, memory://, s3://, gs://, az://",
        ),
        ("s3://[bucket", "is not the URL of a store"),
        ("s3://bucket/?a", "is not the URL of a store"),
    ],
)
def test_wrong_urls(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words.replace("?", r"\?")):
        open_store(text, CLOCK, SCRATCH)


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA123:wonderland@bucket/prefix",
        "s3://AKIA123:wonder#land@bucket/prefix",
        "s3://bucket/?endpoint_url=http://AKIA123:wonderland@host:9000",
        "s3://bucket/?secret_access_key=wonderland",
        "s3://bucket/?aws_access_key_id=wonderland",
        "s3://bucket/?session_token=wonderland",
        "az://container/?account_key=wonderland",
        "az://container/?sas=wonderland",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidArgument, match="leave them out") as caught:
        open_store(text, CLOCK, SCRATCH)
    assert "wonderland" not in str(caught.value)
    assert "AKIA" not in str(caught.value)


def test_stores_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with entry points, as pip would have installed it."""
    (tmp_path / "store_plugin.py").write_text(PLUGIN)
    info = tmp_path / "store_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: store-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[danube_fast.object_stores]\n"
        "plug = store_plugin:open_it\n"
        "seven = store_plugin:not_callable\n"
        "lost = store_plugin_gone:open_it\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    store = open_store("plug://place/prefix", CLOCK, SCRATCH)
    assert store.url == "plug://place/prefix by a plugin"
    probe_store(store)
    for text, words in (
        ("plug://broken", "cannot open plug://broken.*no such place"),
        ("seven://x", "cannot be called"),
        ("lost://x", "cannot be loaded.*store_plugin_gone"),
        ("plugg://x", "there are .*, lost://, plug://, seven://"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            open_store(text, CLOCK, SCRATCH)
    sys.modules.pop("store_plugin", None)


@pytest.mark.parametrize(
    ("url", "module", "package", "extra"),
    [
        ("s3://bucket", "s3", "boto3", "s3"),
        ("gs://bucket", "gcs", "google.api_core.exceptions", "gcs"),
        ("az://container", "azure", "obstore", "azure"),
    ],
)
def test_a_package_that_is_missing_is_named(
    url: str, module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"danube_fast.history.stores.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidArgument, match=rf"pip install 'danube-fast\[{extra}\]'"):
        open_store(url, CLOCK, SCRATCH)


def test_stores_are_imported_when_they_are_opened() -> None:
    code = (
        "import sys, danube_fast.history.stores.opening;"
        "sys.exit(any(name in sys.modules for name in ('boto3', 'obstore', 'google.cloud')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Careless(MemoryStore):
    """A store that overwrites, as several servers do that speak S3."""

    def create(self, key: str, data: bytes) -> None:  # type: ignore[override]
        self.delete([key])
        super().create(key, data)


class CarelessOfParts(MemoryStore):
    """A store that overwrites only with objects in parts."""

    def complete(self, upload: Upload, parts: Sequence[Part]) -> None:
        self.delete([upload.key])
        super().complete(upload, parts)


class Forgetful(MemoryStore):
    """A store that gives back other bytes."""

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        return super().read(key)


def test_stores_that_do_not_keep_their_promises_are_found_out() -> None:
    for kind, words in (
        (Careless, "conditional writes"),
        (CarelessOfParts, "conditional writes"),
        (Forgetful, "other bytes"),
    ):
        store = kind(CLOCK)
        with pytest.raises(FailedPrecondition, match=words):
            probe_store(store)
        assert keys(store) == []
