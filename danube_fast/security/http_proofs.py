"""The sender of a request over HTTP: proved by an API key in a header, or by the certificate that the client showed in its handshake.

    Authorization: Bearer dfk_... --bearer--> principal      when there is one, it decides
    client certificate --> "mtls:<SHA-256>" --credential--> principal

The CA of client certificates only says whose certificates are looked at; each is registered by its fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from danube_fast.security.certificates import PIN_PREFIX, fingerprint_of

__all__ = ["MTLS", "mtls_credential", "principal_of_request"]

MTLS = "mtls:"
"""Begins the credential of a certificate; 64 digits follow."""
_BEARER = "bearer"
Lookup = Callable[[str], str | None]
"""Finds the principal that a proof stands for now; None: it stands for no one."""


def mtls_credential(der: bytes) -> str:
    """Return the credential of a certificate in DER."""
    return MTLS + fingerprint_of(der).removeprefix(PIN_PREFIX)


def principal_of_request(
    headers: Mapping[str, str], peer_certificate: bytes | None, credential: Lookup, bearer: Lookup
) -> str | None:
    """Return the principal of a request; None: it proves no one.

    `headers`: names in lower case. `peer_certificate`: in DER, verified by the TLS layer. `credential` looks a
    credential up, `bearer` the text of an API key.
    """
    authorization = headers.get("authorization")
    if authorization is not None:
        # a certificate beside it does not help: a client whose key was revoked is to notice
        scheme, _, text = authorization.partition(" ")
        return bearer(text.strip()) if scheme.lower() == _BEARER else None
    return credential(mtls_credential(peer_certificate)) if peer_certificate else None
