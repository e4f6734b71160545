"""Objects in Google Cloud Storage, by google-cloud-storage.

Conditional creates are `ifGenerationMatch=0`. Parts wait on this host (see staged.py): Google's ids of
resumable uploads are URLs that need no other credentials, so they are not written down. Credentials are
Google's application default credentials, renewed by its library; an endpoint of plain http:// is taken for an
emulator and gets none.

Texts of errors are made here: those of the library show URLs, among them those of resumable uploads.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import threading
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import urllib3.exceptions
from google.api_core.exceptions import GoogleAPIError, RetryError
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError, TransportError
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

from danube_fast.clock import SECOND_NS, Clock
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
from danube_fast.history.stores.staged import StagedParts
from danube_fast.history.stores.store import (
    ObjectInfo,
    check_object_prefix,
    check_range,
)
from danube_fast.history.stores.url import StoreUrl, store_options

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["GcsOptions", "GcsStore", "open_gcs"]

_CONNECT_SECONDS = 5
_READ_SECONDS = 30
_RETRY_SECONDS = 30
"""How long one call is tried again, with jitter, by Google's library."""
_BACKOFF_MIN_SECONDS, _BACKOFF_MAX_SECONDS = 0.2, 5.0
_CHUNK_BYTES = 16 * 1024 * 1024
"""What a large object holds in memory while it is sent, and what is sent again after an error."""

_REASONS: dict[str, tuple[type[DanubeError], str]] = {
    "rateLimitExceeded": (Unavailable, ""),
    "userRateLimitExceeded": (Unavailable, ""),
    "accountDisabled": (FailedPrecondition, "let an administrator enable the account"),
    "UserProjectAccountProblem": (FailedPrecondition, "correct the project's account for billing"),
    "retentionPolicyNotMet": (
        FailedPrecondition,
        "a policy of the bucket forbids it; let it end before history has to be deleted",
    ),
}
_STATUSES: dict[int, tuple[type[DanubeError], str]] = {
    400: (InvalidArgument, ""),
    401: (PermissionDenied, "check the credentials"),
    403: (PermissionDenied, "check the credentials and what they allow"),
    409: (Unavailable, "another request for this object was under way"),
    412: (AlreadyExists, ""),
    416: (DataLoss, "the object is shorter than what was written"),
    507: (ResourceExhausted, "make room in the store"),
}
_ERRORS = (
    GoogleAPIError,
    GoogleAuthError,
    InvalidResponse,
    DataCorruption,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)
_UPLOAD_ID = re.compile(r"(upload_id=)[^&\s'\")]+")
_SAID_MAX = 300
"""Characters of an answer that is not Google's own, a page of a proxy for example."""
_NO_WATCH = "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"
"""Without it, threads of the library ask for the bucket's metadata, which needs one more permission."""


class GcsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a `gs://` URL."""

    endpoint_url: str | None = None
    """Where an emulator or a private endpoint listens; `STORAGE_EMULATOR_HOST` does as well."""


def open_gcs(url: StoreUrl, clock: Clock, scratch: Path) -> GcsStore:
    """Open the bucket of a `gs://` URL. Raises InvalidArgument for a wrong parameter."""
    return GcsStore(url, clock, scratch, store_options(url, GcsOptions))


class GcsStore(StagedParts):
    """The objects of one bucket below one prefix."""

    errors = _ERRORS

    def __init__(self, url: StoreUrl, clock: Clock, scratch: Path, options: GcsOptions) -> None:
        super().__init__(scratch, clock, url)
        self._place = url.place
        self._options = options
        self._lock = threading.Lock()
        self._client: Any = None

    def create(self, key: str, data: Buffer) -> None:
        """Make an object. Raises AlreadyExists if there is one."""
        name = self._name(key)
        with self._made(key):
            self._blob(name).upload_from_string(
                bytes(data), if_generation_match=0, checksum="crc32c", **self._how()
            )

    def head(self, key: str) -> ObjectInfo | None:
        """Tell of one object; None if there is none."""
        name = self._name(key)
        try:
            with self._explained(key):
                blob = self._blob(name)
                blob.reload(**self._how())
                return self._info(blob)
        except NotFound:
            return None

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        """Read a range. Raises NotFound, or DataLoss if the object ends before."""
        name = self._name(key)
        if count == 0:
            return b""
        limits: dict[str, int] = {}
        if start or count is not None:
            limits["start"] = start
        if count is not None:
            limits["end"] = start + count - 1
        with self._explained(key):
            data: bytes = self._blob(name).download_as_bytes(checksum=None, **limits, **self._how())
        check_range(self.url, key, start + len(data), start, count)
        return data

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object under `prefix`, in order."""
        wanted = self._prefix + check_object_prefix(prefix)
        with self._explained(wanted):
            for blob in self._blobs(wanted):
                yield self._info(blob)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, one with each request."""
        for key in keys:
            name = self._name(key)
            with contextlib.suppress(NotFound), self._explained(key):
                self._blob(name).delete(**self._how())

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _send(self, key: str, path: Path) -> None:
        with self._made(key):
            self._blob(self._name(key), _CHUNK_BYTES).upload_from_filename(
                str(path), if_generation_match=0, checksum="crc32c", **self._how()
            )

    def _connect(self) -> Any:
        with self._lock:
            if self._client is None:
                os.environ.setdefault(_NO_WATCH, "true")
                arguments: dict[str, Any] = {}
                endpoint = self._options.endpoint_url
                if endpoint:
                    arguments["client_options"] = {"api_endpoint": endpoint}
                    if endpoint.startswith("http://"):
                        anonymous: Any = AnonymousCredentials
                        arguments["credentials"] = anonymous()
                self._client = storage.Client(project=None, **arguments)
            return self._client

    def _blob(self, name: str, chunk_bytes: int | None = None) -> Any:
        return self._connect().bucket(self._place).blob(name, chunk_size=chunk_bytes)

    def _blobs(self, prefix: str, count_max: int | None = None) -> Iterable[Any]:
        found: Iterable[Any] = self._connect().list_blobs(
            self._place,
            prefix=prefix,
            max_results=count_max,
            fields="items(name,size,timeCreated),nextPageToken",
            **self._how(),
        )
        return found

    @staticmethod
    def _how() -> dict[str, Any]:
        retry: Any = DEFAULT_RETRY
        return {
            "timeout": (_CONNECT_SECONDS, _READ_SECONDS),
            "retry": retry.with_timeout(_RETRY_SECONDS).with_delay(
                initial=_BACKOFF_MIN_SECONDS, maximum=_BACKOFF_MAX_SECONDS
            ),
        }

    def _info(self, blob: Any) -> ObjectInfo:
        modified_ns = int(blob.time_created.timestamp()) * SECOND_NS
        return ObjectInfo(blob.name.removeprefix(self._prefix), blob.size, modified_ns)

    def _explain(self, error: BaseException, what: str, *, is_listed: bool = False) -> DanubeError:
        if isinstance(error, RetryError) and error.cause is not None:
            error = error.cause
        response = getattr(error, "response", None)
        if isinstance(error, GoogleAuthError):
            if isinstance(error, TransportError) or error.retryable:
                return Unavailable(f"{self.url}: {what}: {_shown(error)}")
            return PermissionDenied(
                f"{self.url}: {what}: {_shown(error)}; see GOOGLE_APPLICATION_CREDENTIALS"
            )
        if response is None:
            return Unavailable(f"{self.url}: {what}: {_shown(error)}")
        status = int(response.status_code)
        reason, message = _said(response)
        if status == HTTPStatus.NOT_FOUND:
            if not is_listed:
                return self._explain_missing(what)
            if reason:
                return FailedPrecondition(
                    f"{self.url}: {message}; make the bucket or correct the store's URL"
                )
        kind, remedy = _REASONS.get(reason) or _STATUSES.get(status) or (Unavailable, "")
        if kind is AlreadyExists:
            return AlreadyExists(f"{self.url}: there is an object {what} already")
        cause = " ".join(filter(None, (str(status), reason, message.rstrip("."))))
        return kind(f"{self.url}: {what}: {cause}" + (f"; {remedy}" if remedy else ""))

    def _explain_missing(self, key: str) -> DanubeError:
        """Find out what a 404 is about: texts do not tell a missing object from a missing bucket."""
        name = self._prefix + key.removeprefix(self._prefix)
        try:
            found = [blob.name for blob in self._blobs(name, 1)]
        except _ERRORS as error:
            return self._explain(error, key, is_listed=True)
        if name in found:
            return Unavailable(
                f"{self.url}: {key}: 404 for an object that is listed; a 404 that names no object "
                "is not the store's own"
            )
        return NotFound(f"{self.url}: there is no object {key}")


def _said(response: Any) -> tuple[str, str]:
    """Reason and message of an answer; no reason if it is not Google's own."""
    text = str(response.text).strip()
    try:
        fault = response.json()["error"]
        first: Any = next(iter(fault.get("errors", ())), {})
        return str(first.get("reason", "")), str(fault.get("message", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "", _UPLOAD_ID.sub(r"\1...", text.partition("\n")[0][:_SAID_MAX])


def _shown(error: BaseException) -> str:
    return _UPLOAD_ID.sub(r"\1...", str(error).partition("\n")[0]).rstrip(".")
