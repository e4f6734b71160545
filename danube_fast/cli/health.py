"""`danube-fast health`: whether a broker is up, as its admin port says; no secret is needed."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from danube_fast.cli.options import OutputForm, OutputOption, command, seconds_option
from danube_fast.cli.output import print_result
from danube_fast.errors import InvalidArgument, PermissionDenied, Unavailable

__all__ = ["TlsOption", "health"]

ADMIN_PORT = 6651
ANSWER_BYTES_MAX = 64 * 1024
OK = 200
TlsOption = Annotated[
    str,
    typer.Option(
        "--tls",
        envvar="DANUBE_TLS",
        metavar="FILE|sha256:HEX",
        help="Which certificate is trusted: a PEM file of CAs, or fingerprints; else the system's CAs.",
    ),
]


@command("danube-fast health https://broker.example:6651 --tls /srv/tls/tls.pem")
def health(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="The admin port; by default port 6651 of this host.", show_default=False
        ),
    ] = "",
    tls: TlsOption = "",
    live: Annotated[
        bool, typer.Option("--live", help="Whether the process lives, though it may not be ready.")
    ] = False,
    timeout: Annotated[float, seconds_option("How long to wait.", 0.1, 60)] = 5.0,
    output: OutputOption = OutputForm.TEXT,
) -> None:  # fmt: skip
    """Ask a broker whether it is ready; exit code 1 if not, 5 if it does not answer."""
    url = url or f"{'https' if tls else 'http'}://127.0.0.1:{ADMIN_PORT}"
    code, told = _ask(url, "/healthz" if live else "/readyz", tls, timeout)
    print_result(output, told, str(told.get("status", "")))
    if code != OK:
        raise typer.Exit(1)


def _ask(url: str, path: str, tls: str, timeout: float) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer. Raises InvalidArgument, PermissionDenied, Unavailable."""
    import http.client
    import ssl
    from urllib.parse import urlsplit

    from danube_fast.security.tls import client_context

    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or ADMIN_PORT
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme not in ("http", "https") or parts.path not in ("", "/"):
        raise InvalidArgument(
            f"{url!r} is not the URL of an admin port; write http://HOST:PORT or https://HOST:PORT"
        )
    connection: http.client.HTTPConnection
    if parts.scheme == "http":
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
    else:
        context = client_context(tls)
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        told = json.loads(answer.read(ANSWER_BYTES_MAX))
    except ssl.SSLCertVerificationError as error:
        raise PermissionDenied(
            f"{url} shows a certificate that is not trusted ({error.verify_message if error.args[1:] else error}); give "
            "its CA or its fingerprint with --tls"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(
            f"{url} does not answer as an admin port ({error}); see that the broker runs, and whether it speaks http or "
            "https"
        ) from error
    finally:
        connection.close()
    if not isinstance(told, dict) or "status" not in told:
        raise Unavailable(
            f"{url} answers, but not as an admin port (status {answer.status}); it may be that of sign-on: "
            "`danube-fast status` shows both"
        )
    return answer.status, told
