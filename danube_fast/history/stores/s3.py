"""Objects in S3 and what speaks like it, by boto3.

Conditional creates are `If-None-Match: *` on PutObject and CompleteMultipartUpload. Both checksum
options are `when_required`, since compatible servers do not know the newer ones; history has checksums
of its own over every byte. Credentials come from the usual chain (environment, shared files, container,
instance), are renewed by boto3 where it can, and read again once when the store calls them expired or unknown.
"""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import msgspec
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)

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
from danube_fast.history.stores.store import (
    ObjectInfo,
    Part,
    Upload,
    check_object_key,
    check_object_prefix,
    check_parts,
)
from danube_fast.history.stores.url import StoreUrl, store_options

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["S3Options", "S3Store", "open_s3"]

PART_BYTES_MIN = 5 * 1024 * 1024
_DELETED_AT_ONCE = 1000
_CONNECT_SECONDS = 5
_READ_SECONDS = 30
_ATTEMPTS = 4
"""Of one request, by boto3: with jitter, half a minute at most."""

_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
)
_REPLACED = _EXPIRED | {"InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
"""Credentials are read again: others may stand there by now."""
_TEXTS: dict[str, tuple[type[DanubeError], str]] = {
    "NoSuchBucket": (FailedPrecondition, "make the bucket or correct the store's URL"),
    "InvalidBucketName": (InvalidArgument, "correct the store's URL"),
    "PermanentRedirect": (FailedPrecondition, "give the bucket's region in the store's URL"),
    "AuthorizationHeaderMalformed": (
        FailedPrecondition,
        "give the bucket's region in the store's URL",
    ),
    "AccessDenied": (PermissionDenied, "check what the credentials allow"),
    "InvalidToken": (PermissionDenied, "check the credentials"),
    "RequestTimeout": (Unavailable, ""),
    "RequestThrottled": (Unavailable, ""),
    "ThrottledException": (Unavailable, ""),
    "Throttling": (Unavailable, ""),
    "ThrottlingException": (Unavailable, ""),
    "IncompleteBody": (Unavailable, ""),
    "NoSuchKey": (NotFound, ""),
    "NoSuchVersion": (NotFound, ""),
    "NoSuchUpload": (NotFound, "the upload has ended"),
    "PreconditionFailed": (AlreadyExists, ""),
    "InvalidObjectState": (
        FailedPrecondition,
        "the object is in an archive (Glacier): restore it, and let no lifecycle rule archive history",
    ),
    "RequestTimeTooSkewed": (
        FailedPrecondition,
        "the clock of this host and the store's differ too much: set the clock",
    ),
    "InvalidRange": (DataLoss, "the object is shorter than what was written"),
    "QuotaExceeded": (ResourceExhausted, "make room in the store"),
    "XMinioStorageFull": (ResourceExhausted, "make room in the store"),
    "InsufficientStorage": (ResourceExhausted, "make room in the store"),
    "NotImplemented": (
        FailedPrecondition,
        "the store does not know this request; history needs conditional creates and multipart",
    ),
}
_STATUSES: dict[int, tuple[type[DanubeError], str]] = {
    301: _TEXTS["PermanentRedirect"],
    400: (InvalidArgument, ""),
    401: (PermissionDenied, "check the credentials"),
    403: (PermissionDenied, "check the credentials and what they allow"),
    404: (Unavailable, "a 404 that names no object is not the store's own"),
    409: (Unavailable, "another request for this object was under way"),
    412: (AlreadyExists, ""),
    416: _TEXTS["InvalidRange"],
    501: _TEXTS["NotImplemented"],
    507: _TEXTS["InsufficientStorage"],
}


_HEAD_REFUSALS = (HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


class _HeadRefused(Exception):
    """A HEAD was refused: its answer has no body that would say why."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class S3Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of an `s3://` URL."""

    endpoint_url: str | None = None
    """Where a compatible server listens; `AWS_ENDPOINT_URL_S3` does as well."""
    region: str | None = None
    path_style: bool = False
    """The bucket stands in the path, not in the name of the host."""
    sse: str | None = None
    """Encryption by the store: `AES256` or `aws:kms`."""
    sse_kms_key_id: str | None = None


def open_s3(url: StoreUrl, clock: Clock, scratch: Path) -> S3Store:
    """Open the bucket of an `s3://` URL. Raises InvalidArgument for a wrong parameter."""
    options = store_options(url, S3Options)
    if options.sse not in (None, "AES256", "aws:kms"):
        raise InvalidArgument(f"{url.text!r}: sse is AES256 or aws:kms, not {options.sse}")
    return S3Store(url, options)


class S3Store:
    """The objects of one bucket below one prefix."""

    part_bytes_min = PART_BYTES_MIN

    def __init__(self, url: StoreUrl, options: S3Options) -> None:
        self.url = url.text
        self._bucket = url.place
        self._prefix = url.prefix
        self._options = options
        self._lock = threading.Lock()
        self._client: Any = None
        self.on_retry: Callable[[], None] = lambda: None
        encryption: dict[str, Any] = {
            "ServerSideEncryption": options.sse,
            "SSEKMSKeyId": options.sse_kms_key_id,
        }
        self._encryption = {name: value for name, value in encryption.items() if value}

    def create(self, key: str, data: Buffer) -> None:
        """Make an object. Raises AlreadyExists if there is one."""
        self._call("put_object", key, Body=_body(data), IfNoneMatch="*", **self._encryption)

    def head(self, key: str) -> ObjectInfo | None:
        """Tell of one object; None if there is none."""
        for is_second in (False, True):
            try:
                found = self._call("head_object", key)
            except _HeadRefused as error:
                # another request says why, if it is more than a missing object
                self._call("list_objects_v2", Prefix=self._prefix, MaxKeys=1)
                if error.status == HTTPStatus.NOT_FOUND:
                    return None
                if is_second:
                    raise PermissionDenied(str(error)) from None
            else:
                return ObjectInfo(key, found["ContentLength"], _time_ns(found["LastModified"]))
        return None

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        """Read a range. Raises NotFound, or DataLoss if the object ends before."""
        if count == 0:
            return b""
        if start == 0 and count is None:
            limits: dict[str, Any] = {}
        else:
            end = "" if count is None else start + count - 1
            limits = {"Range": f"bytes={start}-{end}"}
        data: bytes = self._call("get_object", key, lambda found: found["Body"].read(), **limits)
        if count is not None and len(data) != count:
            raise DataLoss(
                f"{self.url}: object {key} ends {count - len(data)} bytes before the end of bytes "
                f"{start} to {start + count}: it is not the object that was written"
            )
        return data

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object under `prefix`, in order."""
        wanted = self._prefix + check_object_prefix(prefix)
        more: dict[str, Any] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=wanted, **more)
            for entry in page.get("Contents", ()):
                key = entry["Key"].removeprefix(self._prefix)
                yield ObjectInfo(key, entry["Size"], _time_ns(entry["LastModified"]))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, a thousand with each request."""
        names = (self._prefix + check_object_key(key) for key in keys)
        while batch := list(itertools.islice(names, _DELETED_AT_ONCE)):
            objects = [{"Key": name} for name in batch]
            found = self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
            for fault in found.get("Errors", ()):
                if fault.get("Code") != "NoSuchKey":
                    raise self._error(
                        fault.get("Code", ""), 0, fault.get("Message", ""), fault["Key"]
                    )

    def begin(self, key: str) -> Upload:
        """Begin a multipart upload."""
        return Upload(
            key, self._call("create_multipart_upload", key, **self._encryption)["UploadId"]
        )

    def put_part(self, upload: Upload, number: int, offset: int, data: Buffer) -> Part:
        """Send one part. Raises NotFound if the upload has ended."""
        body = _body(data)
        sent = self._call(
            "upload_part", upload.key, UploadId=upload.upload_id, PartNumber=number, Body=body
        )
        return Part(number, offset, len(body), sent["ETag"])

    def complete(self, upload: Upload, parts: Sequence[Part]) -> None:
        """Join the parts. Raises AlreadyExists, or NotFound if the upload has ended."""
        check_parts(upload, parts)
        named = [{"PartNumber": part.number, "ETag": part.tag} for part in parts]
        self._call(
            "complete_multipart_upload",
            upload.key,
            UploadId=upload.upload_id,
            MultipartUpload={"Parts": named},
            IfNoneMatch="*",
        )

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts."""
        try:
            self._call("abort_multipart_upload", upload.key, UploadId=upload.upload_id)
        except NotFound:
            pass

    def uploads(self, prefix: str = "") -> Iterator[tuple[Upload, int]]:
        """Uploads that have not ended."""
        wanted = self._prefix + check_object_prefix(prefix)
        more: dict[str, Any] = {}
        while True:
            page = self._call("list_multipart_uploads", Prefix=wanted, **more)
            for entry in page.get("Uploads", ()):
                key = entry["Key"].removeprefix(self._prefix)
                yield Upload(key, entry["UploadId"]), _time_ns(entry["Initiated"])
            if not page.get("IsTruncated"):
                return
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self, *, anew: bool = False) -> Any:
        with self._lock:
            if self._client is None or anew:
                # a session of its own: the shared one would keep credentials that it has read before
                self._client = boto3.session.Session().client(
                    "s3",
                    endpoint_url=self._options.endpoint_url,
                    region_name=self._options.region,
                    config=Config(
                        connect_timeout=_CONNECT_SECONDS,
                        read_timeout=_READ_SECONDS,
                        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
                        request_checksum_calculation="when_required",
                        response_checksum_validation="when_required",
                        s3={"addressing_style": "path" if self._options.path_style else "auto"},
                        max_pool_connections=32,
                    ),
                )
                self._client.meta.events.register("needs-retry.s3", self._note_try)
            return self._client

    def _note_try(self, attempts: int, **_: Any) -> None:
        """Tell of a request that boto3 has sent again; called behind each try. No answer: boto3 decides."""
        if attempts > 1:
            self.on_retry()

    def _call(
        self,
        name: str,
        key: str | None = None,
        finish: Callable[[Any], Any] = lambda found: found,
        **arguments: Any,
    ) -> Any:
        """One request, with every error in our words."""
        if key is not None:
            arguments["Key"] = self._prefix + check_object_key(key)
        what = key or arguments.get("Prefix") or self._prefix
        for is_second in (False, True):
            try:
                call = getattr(self._connect(anew=is_second), name)
                return finish(call(Bucket=self._bucket, **arguments))
            except ClientError as error:
                answer = error.response
                fault = answer.get("Error", {})
                meta = answer.get("ResponseMetadata", {})
                status = meta.get("HTTPStatusCode", 0)
                if fault.get("Code") in _REPLACED and not is_second:
                    self.on_retry()
                    continue
                if name == "head_object" and status in _HEAD_REFUSALS:
                    raise _HeadRefused(f"{self.url}: {what}: {status}", status) from None
                if meta.get("HTTPHeaders", {}).get("x-amz-delete-marker") == "true":
                    raise NotFound(
                        f"{self.url}: {what} was deleted in a bucket that keeps versions; remove "
                        "the delete marker to have it back"
                    ) from None
                raise self._error(
                    str(fault.get("Code", "")),
                    status,
                    str(fault.get("Message", "")),
                    what,
                ) from None
            except (NoCredentialsError, PartialCredentialsError, ProfileNotFound) as error:
                raise PermissionDenied(
                    f"{self.url}: {error}; give credentials in the environment or in ~/.aws"
                ) from None
            except (CredentialRetrievalError, TokenRetrievalError) as error:
                raise PermissionDenied(f"{self.url}: {error}") from None
            except ParamValidationError as error:
                raise InvalidArgument(f"{self.url}: {what}: {error}") from None
            except BotoCoreError as error:
                raise Unavailable(f"{self.url}: {what}: {error}") from None
            except OSError as error:
                raise Unavailable(f"{self.url}: {what}: {error}") from None
        raise Unavailable(f"{self.url}: {what}: credentials expire again and again")

    def _error(self, code: str, status: int, message: str, what: str) -> DanubeError:
        if code in _EXPIRED:
            return PermissionDenied(
                f"{self.url}: the credentials have expired; renew them ({code})"
            )
        kind, remedy = _TEXTS.get(code) or _STATUSES.get(status) or (Unavailable, "")
        if kind is AlreadyExists:
            return AlreadyExists(f"{self.url}: there is an object {what} already")
        cause = " ".join(filter(None, (code or str(status), message.rstrip("."))))
        return kind(f"{self.url}: {what}: {cause}" + (f"; {remedy}" if remedy else ""))


def _body(data: Buffer) -> bytes | bytearray:
    return data if isinstance(data, bytes | bytearray) else bytes(data)


def _time_ns(value: dt.datetime) -> int:
    return int(value.timestamp()) * SECOND_NS
