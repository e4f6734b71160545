"""Where the history of a run goes: a folder, SeaweedFS, or a sink that keeps no frames.

Variables of the environment that a broker needs are set while it starts, and taken back at the end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from danube_fast.bench.load.rig import Rig
from danube_fast.bench.peers.server import Server, free_port, start_server
from danube_fast.clock import SystemClock
from danube_fast.errors import FailedPrecondition, Unavailable
from danube_fast.history.stores.opening import ENTRY_POINT_GROUP, open_store
from danube_fast.history.stores.store import ObjectStore

__all__ = ["BUCKET", "Store", "local", "module_path", "plain_s3", "s3_url", "seaweed", "sink"]
__all__ += ["surroundings", "why_no_seaweed"]

ACCESS_KEY, SECRET_KEY, REGION, BUCKET = "bench", "bench-secret", "us-east-1", "history"
SEAWEED_SECONDS = 60.0
STEP_SECONDS = 0.1
SINK_SCHEME = "bench-sink"
SINK_MODULE = "danube_fast.bench.workloads.history.sink"


class Store(NamedTuple):
    """A store of a run."""

    url: str
    """For the broker."""
    folder: Path
    """Goes at the end of the run."""
    look_url: str
    """For this process."""
    endpoint: str = ""
    """Of S3."""

    def open(self) -> ObjectStore:
        """Open it from this process."""
        return open_store(self.look_url, SystemClock(), self.folder)


@contextlib.contextmanager
def surroundings(**variables: str) -> Iterator[None]:
    """Variables that processes which are started meanwhile find."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _folder(rig: Rig) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="store-", dir=rig.folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def local(rig: Rig) -> Iterator[Store]:
    """A folder on the disk of the log."""
    with _folder(rig) as folder:
        url = f"file://{folder / 'store'}"
        yield Store(url, folder, url)


@contextlib.contextmanager
def sink(rig: Rig) -> Iterator[Store]:
    """A store of `sink.py`, which brokers find as they find one of any other package."""
    with _folder(rig) as folder:
        package = folder / "bench_sink-1.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-sink\nVersion: 1\n")
        text = f"[{ENTRY_POINT_GROUP}]\n{SINK_SCHEME} = {SINK_MODULE}:open_sink\n"
        (package / "entry_points.txt").write_text(text)
        with surroundings(PYTHONPATH=module_path(folder)):
            url = f"{SINK_SCHEME}://sink?folder={folder / 'store'}"
            yield Store(url, folder, f"file://{folder / 'store'}")


def module_path(folder: Path) -> str:
    """PYTHONPATH with a folder before what it has."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


# ------------------------------------------------------------------ S3


def _weed() -> Path:
    return Path(sys.executable).with_name("weed")


def why_no_seaweed() -> str:
    """Why nothing can be measured with S3 here; empty if it can."""
    if not _weed().is_file():
        return f"SeaweedFS is not installed ({_weed()}; requirements/servers.txt)"
    if importlib.util.find_spec("boto3") is None:
        return "boto3 is not installed; run pip install 'danube-fast[s3]'"
    return ""


def plain_s3(endpoint: str) -> Any:
    """boto3's own client, as any program makes it."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3", endpoint_url=endpoint, region_name=REGION, aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
    )  # fmt: skip


@contextlib.contextmanager
def seaweed(rig: Rig) -> Iterator[Store]:
    """SeaweedFS, a process of its own. Raises FailedPrecondition if it is not installed, Unavailable."""
    reason = why_no_seaweed()
    if reason:
        raise FailedPrecondition(reason)
    others = [f"{part}.port" for part in ("master", "volume", "filer")]
    ports = {name: free_port() for name in [*others, *(f"{x}.grpc" for x in [*others, "s3.port"])]}
    with _folder(rig) as folder:
        server = start_server(folder, "weed", lambda port, data: _command(port, data, ports))
        try:
            endpoint = f"http://{server.address}"
            _make_bucket(endpoint, server)
            keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
            with surroundings(**keys, AWS_DEFAULT_REGION=REGION):
                yield Store(s3_url(endpoint), folder, s3_url(endpoint), endpoint)
        finally:
            server.stop()
            for port in (server.port, *ports.values()):  # it has no option for where these are
                for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108
                    path.unlink(missing_ok=True)


def s3_url(endpoint: str) -> str:
    """URL of the store behind an endpoint."""
    return f"s3://{BUCKET}/bench?endpoint_url={endpoint}&path_style=true"


def _command(port: int, data: Path, ports: dict[str, int]) -> list[str]:
    config = data / "s3.json"
    identity = {
        "name": "bench",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    return [
        str(_weed()), "server", "-s3", f"-s3.config={config}", f"-s3.port={port}",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-dir={data}", "-volume.max=40", "-master.volumeSizeLimitMB=256",
        "-master.telemetry=false", *(f"-{name}={number}" for name, number in ports.items()),
    ]  # fmt: skip


def _make_bucket(endpoint: str, server: Server) -> None:
    client, until = plain_s3(endpoint), time.monotonic() + SEAWEED_SECONDS
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
        except Exception as error:  # it listens before it takes requests
            if time.monotonic() > until:
                raise Unavailable(
                    f"SeaweedFS at {server.address} takes no requests: {error}"
                ) from None
            time.sleep(STEP_SECONDS)
        else:
            client.close()
            return
