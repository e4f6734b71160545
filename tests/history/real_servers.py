"""Emulators of Azure's and Google's stores that others made, where this host has them."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import hmac
import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.history.fakes import BUCKET
from tests.history.s3_servers import free_port

WAIT_SECONDS = 60
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Azurite's own, the same everywhere."""


@contextlib.contextmanager
def azurite() -> Iterator[str]:
    """Its URL without the account; the container is there."""
    with _served(
        "DANUBE_TEST_AZURITE_URL",
        ("azurite-blob", "--inMemoryPersistence", "--silent", "--skipApiVersionCheck",
         "--disableTelemetry", "--blobPort"),
        _make_container,
    ) as endpoint:  # fmt: skip
        yield endpoint


@contextlib.contextmanager
def fake_gcs_server() -> Iterator[str]:
    """Its URL; the bucket is there."""
    with _served(
        "DANUBE_TEST_FAKE_GCS_URL",
        ("fake-gcs-server", "-scheme", "http", "-host", "127.0.0.1", "-backend", "memory",
         "-log-level", "error", "-port"),
        _make_bucket,
    ) as endpoint:  # fmt: skip
        yield endpoint


@contextlib.contextmanager
def _served(
    variable: str, command: tuple[str, ...], prepare: Callable[[str], None]
) -> Iterator[str]:
    given = os.environ.get(variable)
    if given:
        prepare(given)
        yield given
        return
    if not shutil.which(command[0]):
        pytest.skip(f"no {command[0]} on PATH, and {variable} names no server")
    endpoint = f"http://127.0.0.1:{(port := free_port())}"
    server = subprocess.Popen(
        [*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                prepare(endpoint)
            except OSError:
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{command[0]} does not answer at {endpoint}") from None
                time.sleep(0.1)
            else:
                break
        yield endpoint
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait(WAIT_SECONDS)


def _send(endpoint: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=WAIT_SECONDS)
    try:
        connection.request(method, path, body, {**headers, "Content-Length": str(len(body))})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status not in (200, 201, 409):  # 409: it is there
        raise RuntimeError(f"{path}: {answer.status} {text[:500]!r}")


def _make_container(endpoint: str) -> None:
    date = dt.datetime.now(dt.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = f"PUT{chr(10) * 12}{lines}/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    key = base64.b64decode(ACCOUNT_KEY)
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    _send(endpoint, "PUT", f"/{ACCOUNT}/{BUCKET}?restype=container", b"", headers)


def _make_bucket(endpoint: str) -> None:
    body = json.dumps({"name": BUCKET}).encode()
    _send(endpoint, "POST", "/storage/v1/b?project=p", body, {"Content-Type": "application/json"})
