"""Parts that wait on this host: for stores that show no ids of an upload in parts.

Such a store takes an object by one conditional request, so its parts stay in a folder until `complete` sends
the whole. They are durable there and outlive the process, but not the host: what was sent in parts and is
not complete has to be sent again from the log.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danube_fast.clock import Clock
from danube_fast.errors import DanubeError, NotFound, Unavailable
from danube_fast.history.stores.local import LocalStore
from danube_fast.history.stores.store import Part, Upload, check_object_key
from danube_fast.history.stores.url import StoreUrl

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["StagedParts"]


class StagedParts:
    """The half of an object store that keeps parts and explains errors; a store adds `_send` and `_explain`."""

    part_bytes_min = 1
    errors: tuple[type[Exception], ...] = ()
    """What its client raises."""

    def __init__(self, folder: Path, clock: Clock, url: StoreUrl) -> None:
        self._folder = folder
        self._clock = clock
        self.url = url.text
        self._prefix = url.prefix

    def begin(self, key: str) -> Upload:
        """Begin an object whose parts stay here until it is complete."""
        return self._staged.begin(key)

    def put_part(self, upload: Upload, number: int, offset: int, data: Buffer) -> Part:
        """Keep one part, durably. Raises NotFound if the upload has ended."""
        return self._staged.put_part(upload, number, offset, data)

    def complete(self, upload: Upload, parts: Sequence[Part]) -> None:
        """Send the object. Raises AlreadyExists, or NotFound if the upload has ended."""
        self._send(upload.key, self._staged.seal(upload, parts))
        self.abort(upload)

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts."""
        self._staged.abort(upload)

    def uploads(self, prefix: str = "") -> Iterator[tuple[Upload, int]]:
        """Uploads of this host that have not ended."""
        return self._staged.uploads(prefix)

    def _send(self, key: str, path: Path) -> None:
        """Make an object of a file. Raises AlreadyExists if there is one."""
        raise NotImplementedError

    @functools.cached_property
    def _staged(self) -> LocalStore:
        """Made when the first part is: one who only reads needs no folder."""
        return LocalStore(self._folder, self._clock)

    def _name(self, key: str) -> str:
        return self._prefix + check_object_key(key)

    @contextlib.contextmanager
    def _made(self, key: str) -> Iterator[None]:
        """Explain what a request raises that makes an object: nothing that is made can be missing."""
        try:
            with self._explained(key):
                yield
        except NotFound as error:
            raise Unavailable(str(error)) from None

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except self.errors as error:
            if isinstance(error, DanubeError):  # Unavailable is a ConnectionError, too
                raise
            raise self._explain(error, what) from None

    def _explain(self, error: Any, what: str) -> DanubeError:
        """Say in our words what the client has raised."""
        raise NotImplementedError
