"""Objects in Azure Blob Storage, by obstore.

Conditional creates are `If-None-Match: *`, which Azure refuses by 409 BlobAlreadyExists. obstore shows no ids
of an upload in parts, so parts wait on this host (see staged.py). Credentials are found as obstore finds
them: in AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN and others of the environment, from the Azure
command line, a workload identity or a managed one; tokens of the latter are renewed by obstore.

obstore tells causes only in the text of its errors: status and code are read from there. Its text is never
passed on as a whole, since it could show a URL with a signature.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore as Container

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

__all__ = ["AzureOptions", "AzureStore", "open_azure"]

_CONNECT_SECONDS = 5
_REQUEST_SECONDS = 30
"""Of one request with its answer."""
_SEND_SECONDS = 600
"""The same of a whole object that goes out at once: 1 GiB at 2 MiB/s."""
_RETRIES = 3
_RETRY_SECONDS = 30
_BACKOFF_MIN_SECONDS, _BACKOFF_MAX_SECONDS = 0.1, 5.0

_TEXTS: dict[str, tuple[type[DanubeError], str]] = {
    "BlobAlreadyExists": (AlreadyExists, ""),
    # what a signature that may create, but not write, meets at a blob that exists
    "UnauthorizedBlobOverwrite": (AlreadyExists, ""),
    "BlobNotFound": (NotFound, ""),
    "ContainerNotFound": (FailedPrecondition, "make the container or correct the store's URL"),
    "ContainerBeingDeleted": (FailedPrecondition, "make the container again, once it is gone"),
    "ContainerDisabled": (FailedPrecondition, "let an administrator enable the container"),
    "AccountIsDisabled": (FailedPrecondition, "let an administrator enable the account"),
    "InvalidResourceName": (InvalidArgument, "correct the store's URL"),
    "BlobArchived": (
        FailedPrecondition,
        "the object is archived: rehydrate it, and let no lifecycle rule archive history",
    ),
    "BlobBeingRehydrated": (FailedPrecondition, "the object comes out of the archive: wait"),
    "BlobImmutableDueToPolicy": (
        FailedPrecondition,
        "a policy of the container forbids it; let it end before history has to be deleted",
    ),
    "AuthenticationFailed": (
        PermissionDenied,
        "check the credentials, and the clock of this host",
    ),
    "InvalidRange": (DataLoss, "the object is shorter than what was written"),
}
_STATUSES: dict[int, tuple[type[DanubeError], str]] = {
    400: (InvalidArgument, ""),
    401: (PermissionDenied, "check the credentials"),
    403: (PermissionDenied, "check the credentials and what they allow"),
    404: (Unavailable, "a 404 that names no object is not the store's own"),
    409: (Unavailable, "another request for this object was under way"),
    412: (AlreadyExists, ""),
    416: _TEXTS["InvalidRange"],
    507: (ResourceExhausted, "make room in the store"),
}
_STATUS = re.compile(r"status code: (\d{3})|\(code: (\d{3})\)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<\r\n]*)")
_REASON = re.compile(r"Bulk delete request failed for key .*: (.*) \(code: ")
_NO_CONTAINER = "container does not exist"
_ENDS_BEFORE = "but object was only"
"""What obstore says itself when a server answers a range behind the end by nothing."""
_ERRORS = (BaseError, OSError)
"""What obstore raises: a missing object is the FileNotFoundError of Python."""


class AzureOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of an `az://` URL."""

    account: str | None = None
    """Name of the storage account; `AZURE_STORAGE_ACCOUNT_NAME` does as well."""
    endpoint_url: str | None = None
    """Where an emulator listens, with the account in its path."""


def open_azure(url: StoreUrl, clock: Clock, scratch: Path) -> AzureStore:
    """Open the container of an `az://` URL. Raises InvalidArgument for a wrong parameter or a wrong key."""
    return AzureStore(url, clock, scratch, store_options(url, AzureOptions))


class AzureStore(StagedParts):
    """The objects of one container below one prefix."""

    errors = _ERRORS

    def __init__(self, url: StoreUrl, clock: Clock, scratch: Path, options: AzureOptions) -> None:
        super().__init__(scratch, clock, url)
        self._container = self._connect(url.place, options, _REQUEST_SECONDS)
        self._sender = self._connect(url.place, options, _SEND_SECONDS)

    def create(self, key: str, data: Buffer) -> None:
        """Make an object. Raises AlreadyExists if there is one."""
        self._put(self._container, key, bytes(data))

    def head(self, key: str) -> ObjectInfo | None:
        """Tell of one object; None if there is none."""
        name = self._name(key)
        try:
            return self._info(obstore.head(self._container, name))
        except _ERRORS as error:
            if _Cause.of(error).status != HTTPStatus.NOT_FOUND:
                raise self._explain(error, key) from None
        # the answer to a HEAD has no body: another request says so if it is the container that is missing
        next(self.list(), None)
        return None

    def read(self, key: str, start: int = 0, count: int | None = None) -> bytes:
        """Read a range. Raises NotFound, or DataLoss if the object ends before."""
        name = self._name(key)
        if count == 0:
            return b""
        with self._explained(key):
            if count is not None:
                data = bytes(obstore.get_range(self._container, name, start=start, length=count))
            elif start:
                options: Any = {"range": {"offset": start}}
                data = bytes(obstore.get(self._container, name, options=options).bytes())
            else:
                data = bytes(obstore.get(self._container, name).bytes())
        check_range(self.url, key, start + len(data), start, count)
        return data

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object under `prefix`, in order."""
        wanted = self._prefix + check_object_prefix(prefix)
        with self._explained(wanted):
            for page in obstore.list(self._container, wanted or None):
                for entry in page:
                    yield self._info(entry)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, one with each request: of several, the first that is missing would hide the rest."""
        for key in keys:
            name = self._name(key)
            with contextlib.suppress(NotFound), self._explained(key):
                obstore.delete(self._container, name)

    def close(self) -> None:
        """Nothing to be done: obstore closes connections that idle."""

    def _connect(self, container: str, options: AzureOptions, request_seconds: float) -> Any:
        config: Any = {}
        if options.account:
            config["account_name"] = options.account
        if options.endpoint_url:
            config["endpoint"] = options.endpoint_url
        client: Any = {
            "allow_http": (options.endpoint_url or "").startswith("http://"),
            "connect_timeout": dt.timedelta(seconds=_CONNECT_SECONDS),
            "timeout": dt.timedelta(seconds=request_seconds),
        }
        retries: Any = {
            "max_retries": _RETRIES,
            "retry_timeout": dt.timedelta(seconds=_RETRY_SECONDS),
            "backoff": {
                "init_backoff": dt.timedelta(seconds=_BACKOFF_MIN_SECONDS),
                "max_backoff": dt.timedelta(seconds=_BACKOFF_MAX_SECONDS),
                "base": 2,
            },
        }
        try:
            return Container(container, config=config, client_options=client, retry_config=retries)
        except (BaseError, ValueError) as error:
            raise InvalidArgument(
                f"{self.url}: {_Cause.of(error).text}; give the account in the URL or in "
                "AZURE_STORAGE_ACCOUNT_NAME, and credentials in the environment"
            ) from None

    def _put(self, container: Any, key: str, data: bytes | Path) -> None:
        name = self._name(key)
        with self._made(key):
            obstore.put(container, name, data, mode="create", use_multipart=False)

    def _send(self, key: str, path: Path) -> None:
        self._put(self._sender, key, path)

    def _info(self, found: Any) -> ObjectInfo:
        modified_ns = int(found["last_modified"].timestamp()) * SECOND_NS
        return ObjectInfo(found["path"].removeprefix(self._prefix), found["size"], modified_ns)

    def _explain(self, error: Exception, what: str) -> DanubeError:
        cause = _Cause.of(error)
        if cause.is_about_credentials:
            return PermissionDenied(
                f"{self.url}: {what}: {cause.text}; give credentials in the environment"
            )
        kind, remedy = _TEXTS.get(cause.code) or _STATUSES.get(cause.status) or (Unavailable, "")
        if kind is AlreadyExists:
            return AlreadyExists(f"{self.url}: there is an object {what} already")
        return kind(f"{self.url}: {what}: {cause.text}" + (f"; {remedy}" if remedy else ""))


class _Cause(NamedTuple):
    """The cause of an error, as obstore tells it."""

    status: int
    """Of the answer; 0 if there was none."""
    code: str
    """Azure's word for it; empty if the answer had none."""
    text: str
    """Fit to be shown."""
    is_about_credentials: bool

    @classmethod
    def of(cls, error: Exception) -> _Cause:
        """Read the text of an error: obstore tells the cause nowhere else."""
        said = str(error).partition("\n\nDebug source")[0]
        found = _STATUS.search(said)
        status = int(found[1] or found[2]) if found else 0
        code = _first(_CODE, said)
        message = _first(_MESSAGE, said) or _first(_REASON, said)
        if not code and status == HTTPStatus.NOT_FOUND and message:  # of a delete
            code = "ContainerNotFound" if _NO_CONTAINER in message else "BlobNotFound"
        if _ENDS_BEFORE in said:
            code = "InvalidRange"
        if found:
            text = " ".join(filter(None, (str(status), code, message.rstrip("."))))
        else:
            text = said.rpartition(" - ")[2].partition("\n")[0]
        is_refused = isinstance(error, PermissionDeniedError | UnauthenticatedError)
        is_token = "token request" in said and status < HTTPStatus.INTERNAL_SERVER_ERROR
        return cls(status, code, text, is_token or (is_refused and not status))


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
