"""A REST catalogue of Iceberg: the few endpoints that an export asks for, over a catalogue of SQLite.

Commits fail as a test says: `faults` has one for each of the next commits, in their order.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from pyiceberg.catalog.rest import CreateTableRequest, TableResponse
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest


class Fault(NamedTuple):
    """What becomes of a commit."""

    applied: Literal["never", "before", "late"]
    """Before its answer, or as `apply_late` or `late_in` say."""
    status: int
    """Of its answer; 0: the connection ends without one; 200: the answer is none of a catalogue."""


class RestCatalogServer(HTTPServer):
    """Serves one request after the other."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.catalog = SqlCatalog(
            "served", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}"
        )
        self.faults: list[Fault] = []
        self.commits = 0
        """That were asked for."""
        self.late: list[bytes] = []
        """Commits that were answered, and are not applied."""
        self.late_in = 0
        """Apply them just before the n-th request for a table from now on; 0: wait for `apply_late`."""
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def count_request(self) -> None:
        if self.late_in:
            self.late_in -= 1
            if not self.late_in:
                self.apply_late()

    def apply_late(self) -> None:
        """Apply what was answered before; a table that has moved on refuses it."""
        while self.late:
            with contextlib.suppress(CommitFailedException):
                self.commit(self.late.pop(0))

    def commit(self, body: bytes) -> Any:
        asked = CommitTableRequest.model_validate_json(body)
        table = self.catalog.load_table((*asked.identifier.namespace.root, asked.identifier.name))
        return self.catalog.commit_table(table, asked.requirements, asked.updates)


class _Handler(BaseHTTPRequestHandler):
    server: RestCatalogServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(lambda names, body: {} if names == ["config"] else self._loaded(names))

    def do_POST(self) -> None:
        self._answer(self._posted)

    def _loaded(self, names: list[str]) -> Any:
        self.server.count_request()
        return _response(self.server.catalog.load_table((*names[1].split("\x1f"), names[3])))

    def _posted(self, names: list[str], body: bytes) -> Any:
        catalog = self.server.catalog
        if names == ["namespaces"]:
            asked = json.loads(body)
            catalog.create_namespace(tuple(asked["namespace"]))
            return asked
        if len(names) == 4:
            return self._commit(body)
        absent = dict.fromkeys(("location", "partition-spec", "write-order"))
        create = CreateTableRequest.model_validate({**absent, **json.loads(body)})
        table = catalog.create_table(
            (*names[1].split("\x1f"), create.name),
            create.table_schema,
            create.location,
            create.partition_spec or UNPARTITIONED_PARTITION_SPEC,
            properties=create.properties,
        )
        return _response(table)

    def _commit(self, body: bytes) -> Any:
        server = self.server
        server.commits += 1
        server.count_request()
        if not server.faults:
            return server.commit(body)
        fault = server.faults.pop(0)
        if fault.applied == "before":
            server.commit(body)
        elif fault.applied == "late":
            server.late.append(body)
        return fault

    def _answer(self, call: Any) -> None:
        names = [unquote(part) for part in urlsplit(self.path).path.split("/")[2:]]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status = 200
        try:
            found = call(names, body)
        except Exception as error:
            status = _status_of(error)
            found = _error(status, f"{type(error).__name__}: {error}")
        if isinstance(found, Fault):
            status = found.status
            found = _error(status, "so the test wants it")
        if not status:
            return
        text = (
            json.dumps(found) if isinstance(found, dict) else found.model_dump_json(by_alias=True)
        )
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


def _status_of(error: Exception) -> int:
    if type(error).__name__.startswith("NoSuch"):
        return 404
    is_conflict = (
        isinstance(error, CommitFailedException) or "AlreadyExists" in type(error).__name__
    )
    return 409 if is_conflict else 500


def _response(table: Any) -> TableResponse:
    return TableResponse(metadata_location=table.metadata_location, metadata=table.metadata)


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Fault", "code": status}}


@contextlib.contextmanager
def rest_catalog(folder: Path) -> Iterator[RestCatalogServer]:
    """Serve a catalogue, with a new folder for its tables, until the end of the block."""
    with RestCatalogServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.catalog.close()
