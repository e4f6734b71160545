"""The sender of a request over HTTP: proved by an API key in a header, or by the certificate that the client showed in its handshake.

    Authorization: Bearer dfk_... --bearer--> principal      when there is one, it decides
    client certificate --> "mtls:<SHA-256>" or, where that is not registered, "mtls:<subject>" --credential--> principal

The CAs of client certificates only say whose certificates are looked at; each is registered by its fingerprint, or
its subject is, which all of these CAs can give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from danube_fast.security.certificates import PIN_PREFIX, fingerprint_of, subject_of

__all__ = ["MTLS", "mtls_credential", "principal_of_request", "subject_credential"]

MTLS = "mtls:"
"""Begins the credential of a certificate; 64 digits follow, or a subject, which has a `=`."""
_BEARER = "bearer"
Lookup = Callable[[str], str | None]
"""Finds the principal that a proof stands for now; None: it stands for no one."""


def mtls_credential(der: bytes) -> str:
    """Return the credential of a certificate in DER."""
    return MTLS + fingerprint_of(der).removeprefix(PIN_PREFIX)


def subject_credential(der: bytes) -> str:
    """Return the credential of a certificate's subject; empty: it has none."""
    subject = subject_of(der)
    return f"{MTLS}{subject}" if subject else ""


def principal_of_request(
    headers: Mapping[str, str], peer_certificate: bytes | None, registered: Callable[[str], object],
    credential: Lookup, bearer: Lookup,
) -> str | None:  # fmt: skip
    """Return the principal of a request; None: it proves no one.

    `headers`: names in lower case. `peer_certificate`: in DER, verified by the TLS layer. `registered` says whether
    there is a record of a credential, one that has ended too; `credential` looks a credential up, `bearer` the text of
    an API key.
    """
    authorization = headers.get("authorization")
    if authorization is not None:
        # a certificate beside it does not help: a client whose key was revoked is to notice
        scheme, _, text = authorization.partition(" ")
        return bearer(text.strip()) if scheme.lower() == _BEARER else None
    if not peer_certificate:
        return None
    proof = mtls_credential(peer_certificate)
    # a record of the certificate itself decides alone, also when it has ended
    if not registered(proof):
        proof = subject_credential(peer_certificate)
    return credential(proof) if proof else None
