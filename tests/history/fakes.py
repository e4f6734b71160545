"""Servers in this process that answer as Azure Blob Storage and Google Cloud Storage do: the requests that the
stores send, and no others. They check no signatures, and show lists in small pages."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import email
import email.policy
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import google_crc32c

WAIT_SECONDS = 60
PAGE = 7
BUCKET = "history"


class Request(NamedTuple):
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}


class Object(NamedTuple):
    data: bytes
    made: dt.datetime


class Fake:
    """Objects under a lock, behind HTTP."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, Object] = {}
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args: object) -> None:
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = urllib.parse.urlsplit(self.path)
                query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, parts.path, query, headers, body)
                answer = fake.answer(request)
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in answer.headers:
                    self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_SECONDS)

    def answer(self, request: Request) -> Answer:
        raise NotImplementedError

    def create(self, name: str, data: bytes) -> bool:
        """Whether there was none."""
        with self.lock:
            is_new = name not in self.objects
            if is_new:
                self.objects[name] = Object(data, dt.datetime.now(dt.UTC))
        return is_new

    def page(self, prefix: str, after: str, count: int = PAGE) -> tuple[list[str], str]:
        """Names of one page, and the mark of the next one."""
        with self.lock:
            names = sorted(name for name in self.objects if name.startswith(prefix))
        names = [name for name in names if name > after]
        return names[:count], names[count - 1] if len(names) > count else ""


def ranged(found: Object, headers: Mapping[str, str]) -> tuple[bytes, Answer | None]:
    """The bytes that were asked for, and the answer without them if it is a part."""
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", headers.get("x-ms-range", "")))
    if not asked:
        return found.data, None
    start, size = int(asked[1]), len(found.data)
    if start >= size:
        return b"", Answer(416, b"", {"Content-Range": f"bytes */{size}"})
    end = min(int(asked[2] or size - 1), size - 1)
    return found.data[start : end + 1], Answer(
        206, b"", {"Content-Range": f"bytes {start}-{end}/{size}"}
    )


class AzureFake(Fake):
    """One account with one container."""

    account = "devstoreaccount1"

    def answer(self, request: Request) -> Answer:
        path = urllib.parse.unquote(request.path).removeprefix(f"/{self.account}/")
        container, _, name = path.partition("/")
        if container != BUCKET:
            return self._fault(404, "ContainerNotFound", "The specified container does not exist.")
        if request.query.get("comp") == "list":
            return self._list(request.query)
        if request.query.get("comp") == "batch":
            return self._batch(request)
        if request.method == "PUT":
            if request.headers.get("if-none-match") != "*":
                return self._fault(400, "Unconditional", "This put would overwrite.")
            if not self.create(name, request.body):
                return self._fault(409, "BlobAlreadyExists", "The specified blob already exists.")
            return Answer(201, b"", self._headers(self.objects[name]))
        found = self.objects.get(name)
        if found is None:
            return self._fault(404, "BlobNotFound", "The specified blob does not exist.")
        data, part = ranged(found, request.headers)
        if part and part.status == 416:
            return self._fault(416, "InvalidRange", "The range specified is invalid.")
        return Answer(
            206 if part else 200,
            data,
            {
                **self._headers(found),
                **(part.headers if part else {}),
                "Content-Length": str(len(data)),
            },
        )

    @staticmethod
    def _headers(found: Object) -> dict[str, str]:
        made = found.made.strftime("%a, %d %b %Y %H:%M:%S GMT")
        return {
            "Last-Modified": made,
            "ETag": f'"{found.made.timestamp()}"',
            "x-ms-blob-type": "BlockBlob",
        }

    @staticmethod
    def _fault(status: int, code: str, text: str) -> Answer:
        body = f'<?xml version="1.0"?>\n<Error>\n<Code>{code}</Code>\n<Message>{text}</Message></Error>'
        return Answer(
            status, body.encode(), {"x-ms-error-code": code, "Content-Type": "application/xml"}
        )

    def _list(self, query: Mapping[str, str]) -> Answer:
        names, more = self.page(query.get("prefix", ""), query.get("marker", ""))
        blobs = ""
        for name in names:
            found = self.objects[name]
            headers = self._headers(found)
            blobs += (
                f"<Blob><Name>{escape(name)}</Name><Properties>"
                f"<Last-Modified>{headers['Last-Modified']}</Last-Modified><Etag>{headers['ETag']}</Etag>"
                f"<Content-Length>{len(found.data)}</Content-Length>"
                "<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            )
        text = (
            f"<?xml version='1.0'?><EnumerationResults><Blobs>{blobs}</Blobs>"
            f"<NextMarker>{escape(more)}</NextMarker></EnumerationResults>"
        )
        return Answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _batch(self, request: Request) -> Answer:
        """Deletes, each with an answer of its own."""
        text = request.body.decode()
        answers = ""
        for number, target in enumerate(re.findall(r"DELETE (\S+) HTTP/1.1", text)):
            path = urllib.parse.unquote(urllib.parse.urlsplit(target).path)
            name = path.partition(f"/{BUCKET}/")[2]
            with self.lock:
                is_there = self.objects.pop(name, None) is not None
            said = "HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"
            if not is_there:
                said = (
                    "HTTP/1.1 404 The specified blob does not exist.\r\n"
                    "x-ms-error-code: BlobNotFound\r\nContent-Length: 0\r\n\r\n"
                )
            answers += (
                f"--b\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n{said}\r\n"
            )
        return Answer(
            202, f"{answers}--b--\r\n".encode(), {"Content-Type": "multipart/mixed; boundary=b"}
        )


class GcsFake(Fake):
    """One bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, tuple[str, bytearray]] = {}
        self._ids = itertools.count(1)

    def answer(self, request: Request) -> Answer:
        _, kind, rest = request.path.partition("/storage/v1/b/")
        bucket, _, name = rest.partition("/o")
        name = urllib.parse.unquote(name.removeprefix("/"))
        if not kind or bucket != BUCKET:
            return self._fault(404, "notFound", "The specified bucket does not exist.")
        if request.path.startswith("/upload/"):
            return self._upload(request)
        if not name:
            return self._list(request.query)
        if request.method == "DELETE":
            with self.lock:
                is_there = self.objects.pop(name, None) is not None
            return Answer(204) if is_there else self._missing(name)
        found = self.objects.get(name)
        if found is None:
            return self._missing(name)
        if request.query.get("alt") != "media":
            return self._json(self._resource(name, found))
        data, part = ranged(found, request.headers)
        if part and part.status == 416:
            return self._fault(416, "requestedRangeNotSatisfiable", "Request range not satisfiable")
        return Answer(206 if part else 200, data, part.headers if part else {})

    @staticmethod
    def _json(value: object, status: int = 200) -> Answer:
        return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    @classmethod
    def _fault(cls, status: int, reason: str, message: str) -> Answer:
        return cls._json(json.loads(fault_text(status, reason, message)), status)

    @classmethod
    def _missing(cls, name: str) -> Answer:
        return cls._fault(404, "notFound", f"No such object: {BUCKET}/{name}")

    @staticmethod
    def _resource(name: str, found: Object) -> dict[str, Any]:
        crc = google_crc32c.value(found.data).to_bytes(4, "big")
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": BUCKET,
            "generation": "1",
            "size": str(len(found.data)),
            "timeCreated": found.made.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "crc32c": base64.b64encode(crc).decode(),
        }

    def _list(self, query: Mapping[str, str]) -> Answer:
        count = min(PAGE, int(query.get("maxResults", PAGE)))
        names, more = self.page(query.get("prefix", ""), query.get("pageToken", ""), count)
        items = [self._resource(name, self.objects[name]) for name in names]
        return self._json({"items": items, **({"nextPageToken": more} if more else {})})

    def _make(self, name: str, data: bytes) -> Answer:
        if not self.create(name, data):
            return self._fault(412, "conditionNotMet", "At least one condition did not hold.")
        return self._json(self._resource(name, self.objects[name]))

    def _upload(self, request: Request) -> Answer:
        query = request.query
        if request.method == "POST" and query.get("ifGenerationMatch") != "0":
            return self._fault(400, "unconditional", "This upload would overwrite.")
        if query.get("uploadType") == "multipart":
            head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
            message = email.message_from_bytes(head + request.body, policy=email.policy.HTTP)
            # the parser of mail changes ends of lines: the parts are cut out of the body
            mark = b"--" + str(message.get_boundary()).encode()
            about, data = (
                part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
                for part in request.body.split(mark)[1:3]
            )
            return self._make(json.loads(about)["name"], data)
        if request.method == "POST":
            number = f"session-{next(self._ids)}"
            self.sessions[number] = (json.loads(request.body)["name"], bytearray())
            where = f"http://{request.headers['host']}{request.path}?upload_id={number}"
            return Answer(200, b"", {"Location": where})
        name, so_far = self.sessions[query["upload_id"]]
        sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", request.headers["content-range"])
        if sent:
            del so_far[int(sent[1]) :]
            so_far += request.body
            if sent[3] != "*" and len(so_far) == int(sent[3]):
                return self._make(name, bytes(so_far))
        return Answer(308, b"", {"Range": f"bytes=0-{len(so_far) - 1}"} if so_far else {})


def fault_text(status: int, reason: str, message: str = "as planned") -> str:
    """The body of an error of Google's."""
    errors = [{"domain": "global", "reason": reason, "message": message}]
    return json.dumps({"error": {"code": status, "message": message, "errors": errors}})
