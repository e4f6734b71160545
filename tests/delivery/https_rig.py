"""A secured broker whose admin port speaks TLS, and certificates of some clients."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from danube_fast.security.http_proofs import mtls_credential
from danube_fast.security.tls import client_context
from tests.delivery.test_security import SecuredServer
from tests.security.authority import Authority, write_pem
from tests.security.test_tls import make

WAIT_SECONDS = 60.0
HONEST_SECONDS = 15.0
"""A request beside a crowd is answered in a small part of it; the machine may be busy."""
RELOAD_SECONDS = 20.0
HALF_OPEN = 1000
CLIENTS = ("viewer", "producer", "disabled", "expired")


class Answer(NamedTuple):
    """Of the admin port."""

    code: int
    body: bytes

    @property
    def told(self) -> Any:
        """Its JSON."""
        return json.loads(self.body)


class HttpsServer(SecuredServer):
    """A broker with TLS on its admin port, and certificates for some clients."""

    def __init__(self, folder: Path, *, revokes: bool = False, **changes: Any) -> None:
        """`revokes`: the port looks at the CRL of `authority`, which all clients are of then."""
        self.tls = make(folder / "tls")
        self.trusted = folder / "trusted.pem"
        """The copy that clients have."""
        shutil.copy2(self.tls.certificate, self.trusted)
        self.authority = Authority()
        """The CA of clients that have not made their certificates themselves."""
        self.between = Authority("CN=between", parent=self.authority)
        """A CA below it."""
        self.crl = folder / "clients.crl"
        self.write_lists()
        names = (*CLIENTS, "stranger", "unknown")
        if revokes:
            self.own = {name: self.authority.issue(folder / name, f"CN={name}") for name in names}
            self.own["below"] = self.between.issue(
                folder / "below", "CN=below", chain=self.between.pem
            )
            changes["tls_client_crl"] = str(self.crl)
        else:
            self.own = {name: make(folder / name, name) for name in names}
        alone = () if revokes else (made for name, made in self.own.items() if name != "unknown")
        cas = write_pem(
            folder / "client-ca.pem", self.authority.pem, self.between.pem,
            *[made.certificate.read_bytes() for made in alone],
        )  # fmt: skip
        super().__init__(
            folder / "data", folder, workers=1, tls_certificate=str(self.tls.certificate),
            tls_key=str(self.tls.key), tls_client_ca=str(cas), **changes,
        )  # fmt: skip

    def write_lists(self) -> None:
        """Write what both CAs have revoked."""
        write_pem(self.crl, self.authority.crl(), self.between.crl())

    @property
    def admin_port(self) -> int:
        return self.port + 1

    def context(self, client: str = "", tls: str | None = None) -> ssl.SSLContext:
        """What a client trusts, and its own certificate."""
        made = client_context(str(self.trusted) if tls is None else tls)
        if client:
            own = self.own[client]
            made.load_cert_chain(own.certificate, own.key)
        return made

    def connect(self, client: str = "", tls: str | None = None) -> http.client.HTTPSConnection:
        context = self.context(client, tls)
        return http.client.HTTPSConnection(
            "127.0.0.1", self.admin_port, timeout=WAIT_SECONDS, context=context
        )

    def ask(self, path: str, client: str = "", *, tls: str | None = None, **headers: str) -> Answer:
        connection = self.connect(client, tls)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return Answer(response.status, response.read())
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        text = self.ask("/metrics", "viewer").body.decode()
        (value,) = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"danube_fast_{name}"
        ]
        return float(value)

    def register(self) -> None:
        """Register the certificates of clients; strangers have none registered."""
        with self.come_in("ann") as ann:
            for name in CLIENTS:
                ann.admin.set_principal(name, disabled=name == "disabled")
                der = ssl.PEM_cert_to_DER_cert(self.own[name].certificate.read_text())
                seconds = 1 if name == "expired" else 0
                ann.admin.set_credential(mtls_credential(der), name, expires_seconds=seconds)
                role = "producer" if name == "producer" else "viewer"
                scope = "/shop/*" if name == "producer" else "cluster"
                ann.admin.set_binding(name, f"user:{name}", role, scope)
