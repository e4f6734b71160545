"""Sign-ons with tokens in a second of one core: the verification alone, and whole requests over HTTPS.

    python -m danube_fast.bench.sign_on

The process of sign-on is charged by its CPU time, so that what else runs on the host does not count.
"""

from __future__ import annotations

import json
import os
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import danube_fast
from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import Internal
from danube_fast.security.certificates import new_certificate
from danube_fast.security.curve import new_key_pair
from danube_fast.security.issuers import Issuer
from danube_fast.security.jwks import KeySet
from danube_fast.security.tls import client_context
from danube_fast.security.tokens import TokenVerifier
from danube_fast.testing.broker import Broker

__all__ = ["measure_requests", "measure_verification"]

ISSUER, AUDIENCE = "https://login.example.com/", "danube"
ALGORITHMS = ("HS256", "RS256", "ES256", "EdDSA")
CLIENTS = 8
_SECRET = "0123456789abcdef" * 4
_clock = SystemClock()


def _key_of(algorithm: str) -> tuple[Any, Any]:
    """Draw a key: what signs, and what verifies."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    if algorithm == "HS256":
        return _SECRET, _SECRET.encode()
    private: Any
    if algorithm == "RS256":
        private = rsa.generate_private_key(65537, 2048)
    elif algorithm == "ES256":
        private = ec.generate_private_key(ec.SECP256R1())
    else:
        private = ed25519.Ed25519PrivateKey.generate()
    return private, private.public_key()


def _token(private: Any, algorithm: str, number: int) -> str:
    import jwt

    now = _clock.wall_ns() // SECOND_NS
    claims = {
        "iss": ISSUER, "aud": AUDIENCE, "sub": "bench", "iat": now, "exp": now + 600, "jti": str(number),
        "groups": ["readers", "writers"],
    }  # fmt: skip
    return jwt.encode(claims, private, algorithm, {"kid": "one"})


def measure_verification(algorithm: str, count: int = 2000) -> float:
    """Return verifications of tokens in a second of CPU time, the key at hand."""
    private, public = _key_of(algorithm)
    is_secret = algorithm == "HS256"
    issuer = Issuer(
        name="bench", issuer=ISSUER, audience=AUDIENCE, algorithms=[algorithm],
        secret_file="unused" if is_secret else "", jwks_file="" if is_secret else "unused",
    )  # fmt: skip
    keys, verifier = KeySet(), TokenVerifier([issuer])
    keys.add(algorithm, "" if is_secret else "one", public)
    tokens = [_token(private, algorithm, number) for number in range(count)]
    before = _cpu_seconds(os.getpid())
    for token in tokens:
        opened = verifier.open(token)
        key = keys.find(opened.algorithm, opened.kid)
        verifier.verify(opened, key, _clock.wall_ns())
    return count / max(_cpu_seconds(os.getpid()) - before, 0.01)


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _broker(folder: Path, algorithm: str) -> Iterator[tuple[Broker, Any, ssl.SSLContext]]:
    """Run a broker with sign-on, where `bench` may come in; what signs its tokens, and what trusts its certificate."""
    import jwt

    private, public = _key_of(algorithm)
    certificate = new_certificate(folder / "tls", ["127.0.0.1"])
    if algorithm == "HS256":
        secret = folder / "secret"
        secret.touch(0o600)
        secret.write_text(_SECRET)
        source = f'secret_file = "{secret}"'
    else:
        made = jwt.get_algorithm_by_name(algorithm).to_jwk(public, as_dict=True)
        (folder / "keys.json").write_text(json.dumps({"keys": [{**made, "kid": "one"}]}))
        source = 'jwks_file = "keys.json"'
    issuers = folder / "issuers.toml"
    issuers.write_text(
        f'[[issuer]]\nname = "bench"\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\n'
        f'algorithms = ["{algorithm}"]\nunregistered = true\n{source}\n'
    )
    with Broker(
        data_dir=folder / "data", auth="required", sign_on="127.0.0.1:0", tokens=str(issuers),
        tls_certificate=str(certificate.certificate), tls_key=str(certificate.key),
    ) as broker:  # fmt: skip
        yield broker, private, client_context(str(certificate.certificate))


def measure_requests(algorithm: str, *, fresh: bool, count: int = 2000) -> dict[str, float]:
    """Sign on `count` times with different tokens and keys, over connections that stay, or `fresh` ones.

    Returns sign-ons in a second of the process's CPU time, and in a second of the clock with all of it on one core.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        _broker(Path(folder), algorithm) as (broker, private, context),
    ):
        ready = broker.ready
        key_file = broker.data_dir / "bootstrap-admin.key"
        with danube_fast.connect(
            broker.url, server_key=ready["server_key"], key_file=key_file, transport="zmq"
        ) as client:
            rows = client.admin.cluster_status()["processes"]
        pid = next(row["pid"] for row in rows if row["process"] == "sign_on")
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
        parts = urlsplit(ready["sign_on"])

        def connect() -> HTTPSConnection:
            return HTTPSConnection(parts.hostname or "", parts.port, timeout=60, context=context)

        requests = [
                (_token(private, algorithm, number), new_key_pair().public) for number in range(count)
            ]  # fmt: skip
        _run(requests[:CLIENTS], connect, fresh=fresh)  # the cache is warm
        before, began_ns = _cpu_seconds(pid), _clock.monotonic_ns()
        _run(requests, connect, fresh=fresh)
        seconds = (_clock.monotonic_ns() - began_ns) / SECOND_NS
        return {
            "per_cpu_second": count / max(_cpu_seconds(pid) - before, 0.01),
            "per_second": count / seconds,
        }


def _run(
    requests: list[tuple[str, str]], connect: Callable[[], HTTPSConnection], *, fresh: bool
) -> None:
    """Send the requests from several threads. Raises Internal if one is refused."""
    faults: list[str] = []

    def work(mine: list[tuple[str, str]]) -> None:
        connection = connect()
        for token, public_key in mine:
            connection.request(
                "POST", "/v1/sign-on", json.dumps({"public_key": public_key}),
                {"Authorization": f"Bearer {token}"},
            )  # fmt: skip
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                faults.append(body.decode())
                break
            if fresh:
                connection.close()
        connection.close()

    threads = [
        threading.Thread(target=work, args=(requests[number::CLIENTS],)) for number in range(CLIENTS)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise Internal(f"a sign-on was refused: {faults[0]}; look at the broker's log")


def main() -> None:
    """Print all of it, a line of JSON each."""
    for algorithm in ALGORITHMS:
        row: dict[str, Any] = {"workload": "sign_on", "algorithm": algorithm}
        row["verifications_per_cpu_second"] = measure_verification(algorithm)
        for name, fresh in (("kept", False), ("fresh", True)):
            for what, value in measure_requests(algorithm, fresh=fresh).items():
                row[f"{name}_{what}"] = value
        shown = {
            name: round(each) if isinstance(each, float) else each for name, each in row.items()
        }
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
