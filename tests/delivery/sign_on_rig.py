"""Issuers of tokens, and clients that sign on by HTTPS."""

from __future__ import annotations

import http.client
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from danube_fast.security.certificates import NewCertificate, new_certificate
from danube_fast.security.tls import ServerTls, client_context
from tests.delivery.test_security import SecuredServer

__all__ = ["AUDIENCE", "ISSUER", "IssuerKey", "JwksServer", "SignOnServer", "issuer_toml"]

ISSUER = "https://login.example.com/"
AUDIENCE = "danube"
KINDS = {
    "RS256": lambda: rsa.generate_private_key(65537, 2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


class IssuerKey:
    """A key pair of an issuer."""

    def __init__(self, algorithm: str = "ES256", kid: str = "one") -> None:
        self.algorithm, self.kid = algorithm, kid
        self.private: Any = KINDS[algorithm]()

    @property
    def public(self) -> Any:
        return self.private.public_key()

    def jwk(self, **changes: Any) -> dict[str, Any]:
        """The public key as JWKS lists it."""
        made = jwt.get_algorithm_by_name(self.algorithm).to_jwk(self.public, as_dict=True)
        return {**made, "kid": self.kid, "use": "sig", **changes}

    def token(
        self, *, headers: dict[str, Any] | None = None, without: tuple[str, ...] = (), **claims: Any
    ) -> str:
        """A token of `pia` that is good for a minute."""
        now = int(time.time())
        all_claims = {
            "iss": ISSUER, "aud": AUDIENCE, "sub": "pia", "exp": now + 60, "iat": now, **claims,
        }  # fmt: skip
        for name in without:
            del all_claims[name]
        return jwt.encode(
            all_claims, self.private, self.algorithm, {"kid": self.kid, **(headers or {})}
        )


def issuer_toml(**fields: Any) -> str:
    """An entry of the file of issuers."""
    entry = {
        "name": "corp", "issuer": ISSUER, "audience": AUDIENCE, "algorithms": ["ES256"],
        "leeway_seconds": 0, **fields,
    }  # fmt: skip
    lines = [f"{name} = {json.dumps(value)}" for name, value in entry.items()]
    return "\n".join(["[[issuer]]", *lines, ""])


class JwksServer:
    """An HTTPS server of keys, with a certificate of its own."""

    def __init__(self, folder: Path) -> None:
        self.certificate = new_certificate(folder / "jwks-tls", ["127.0.0.1"])
        self.answer: tuple[int, dict[str, str], bytes] = (200, {}, b"")
        self.requests = 0
        self.stall = threading.Event()
        """Unset: answers wait."""
        self.stall.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests += 1
                server.stall.wait(60)
                status, headers, body = server.answer
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    self.wfile.write(body)
                except OSError:
                    return

            def log_message(self, *_: Any) -> None:
                return

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                return  # a client that leaves early

        self._http = Quiet(("127.0.0.1", 0), Handler)
        tls = ServerTls(self.certificate.certificate, self.certificate.key)
        self._http.socket = tls.context.newest.wrap_socket(  # type: ignore[attr-defined]
            self._http.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = f"https://127.0.0.1:{self._http.server_address[1]}/keys"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    def serve(self, *keys: dict[str, Any]) -> None:
        """Answer with these keys from now on."""
        self.answer = (200, {}, json.dumps({"keys": keys}).encode())

    def close(self) -> None:
        self.stall.set()
        self._http.shutdown()
        self._thread.join(10)
        self._http.server_close()


class SignOnServer(SecuredServer):
    """A secured broker with sign-on."""

    def __init__(self, data_dir: Path, folder: Path, issuers: str = "", **changes: Any) -> None:
        self.certificate: NewCertificate = new_certificate(folder / "tls", ["127.0.0.1"])
        if issuers:
            tokens = folder / "issuers.toml"
            tokens.write_text(issuers)
            tokens.chmod(0o644)
            changes["tokens"] = str(tokens)
        super().__init__(
            data_dir, folder, sign_on="127.0.0.1:0", tls_certificate=str(self.certificate.certificate),
            tls_key=str(self.certificate.key), **changes,
        )  # fmt: skip

    @property
    def sign_on_url(self) -> str:
        assert self.broker is not None
        return str(self.broker.ready["sign_on"])

    def connection(self, timeout: float = 30.0) -> http.client.HTTPSConnection:
        """A connection to the sign-on port that trusts its certificate alone."""
        context = client_context(str(self.certificate.certificate))
        parts = urlsplit(self.sign_on_url)
        return http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=timeout, context=context
        )

    def sign_on(self, bearer: str, public_key: str, **headers: str) -> tuple[int, dict[str, Any]]:
        """Sign on; the status and the answer."""
        connection = self.connection()
        try:
            connection.request(
                "POST", "/v1/sign-on", json.dumps({"public_key": public_key}),
                {"Authorization": f"Bearer {bearer}", **headers},
            )  # fmt: skip
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def pids(self) -> dict[str, int]:
        """Processes by name."""
        with self.come_in("ann") as ann:
            rows = ann.admin.cluster_status()["processes"]
        return {row["process"]: row["pid"] for row in rows}
