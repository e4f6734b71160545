"""Servers that speak S3, for tests: moto in this process, SeaweedFS in one of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

WAIT_SECONDS = 60
ACCESS_KEY = "an-access-key"
SECRET_KEY = "a-secret-key"
BUCKET = "history"


def free_ports(count: int) -> list[int]:
    """Ports that are free, each another one: those that were closed may be given again."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def free_port() -> int:
    """A port that is free."""
    return free_ports(1)[0]


def plain_client(endpoint: str) -> Any:
    """boto3's client as any program would make it."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
        ),
    )


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """Run moto; yields its URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextlib.contextmanager
def seaweed_server(folder: Path) -> Iterator[str]:
    """Run SeaweedFS with one user; yields its URL once it takes requests."""
    program = Path(sys.executable).with_name("weed")
    if not program.exists():
        pytest.fail(
            "SeaweedFS is not installed; `./run test` installs it (requirements/servers.txt)"
        )
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    names = [f"{part}.port" for part in ("s3", "master", "volume", "filer")]
    names += [f"{name}.grpc" for name in names]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    arguments = [
        str(program), "server", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-volume.max=20",
        "-master.volumeSizeLimitMB=256", "-master.telemetry=false",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    log = folder / "weed.log"
    with log.open("wb") as output:
        server = subprocess.Popen(arguments, cwd=folder, stdout=output, stderr=output)
    try:
        endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        until = time.monotonic() + WAIT_SECONDS
        while True:
            if server.poll() is not None or time.monotonic() > until:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS does not answer at {endpoint}:\n{tail}")
            try:
                plain_client(endpoint).create_bucket(Bucket="probe")
            except Exception:
                time.sleep(0.1)
            else:
                break
        yield endpoint
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait(WAIT_SECONDS)
        for port in ports.values():  # it has no option for all of these
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()
