"""Sign-on over HTTPS, as both sides write it: an API key or a token once, for the CURVE key of a client.

POST /v1/sign-on
Authorization: Bearer <API key or token>       SignOnRequest
200 Grant                                      else Refusal
"""

from __future__ import annotations

import msgspec

__all__ = ["PATH", "Grant", "Refusal", "SignOnRequest"]

PATH = "/v1/sign-on"


class SignOnRequest(msgspec.Struct, frozen=True):
    """Body of the request."""

    public_key: str
    """40 characters of Z85."""


class Grant(msgspec.Struct, frozen=True):
    """Answer to a client that has signed on."""

    principal: str
    expires_seconds: int
    server_keys: list[str]
    """Public keys of the broker, the newest first."""


class Refusal(msgspec.Struct, frozen=True):
    """Answer to any other request: the name of the error, and its text."""

    code: str = ""
    text: str = ""
