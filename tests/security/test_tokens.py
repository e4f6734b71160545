"""Tokens: what is verified is good, and each way in which a token can be wrong is refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from danube_fast.clock import SECOND_NS, SystemClock
from danube_fast.errors import DanubeError, InvalidArgument, PermissionDenied, Unavailable
from danube_fast.security.issuers import Issuer, read_issuers
from danube_fast.security.jwks import KeySet, load_keys, parse_jwks
from danube_fast.security.tokens import TokenVerifier, Verified
from danube_fast.workers.sign_on import key_cache
from danube_fast.workers.sign_on.key_cache import KeyCache
from tests.delivery.sign_on_rig import AUDIENCE, ISSUER, IssuerKey, JwksServer, issuer_toml

SECRET = b"0123456789abcdef0123456789abcdef"
PAST, FUTURE = -100, 100


@pytest.fixture(scope="module")
def keys() -> dict[str, IssuerKey]:
    return {name: IssuerKey(name) for name in ("RS256", "ES256", "EdDSA")}


def issuer(**changes: Any) -> Issuer:
    fields = {
        "name": "corp", "issuer": ISSUER, "audience": AUDIENCE, "leeway_seconds": 0,
        "algorithms": ["RS256", "ES256", "EdDSA"], "jwks_file": "unused", **changes,
    }  # fmt: skip
    return Issuer(**fields)


def verified(token: str, key_set: KeySet, trusted: Issuer | None = None) -> Verified:
    """What a token vouches for."""
    verifier = TokenVerifier([trusted or issuer()])
    opened = verifier.open(token)
    key = key_set.find(opened.algorithm, opened.kid)
    if key is None:
        raise PermissionDenied("no such key")
    return verifier.verify(opened, key, time.time_ns())


def jwks(*listed: dict[str, Any], **changes: Any) -> KeySet:
    return parse_jwks(json.dumps({"keys": listed}).encode(), issuer(**changes))


def encoded(part: Any) -> str:
    content = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def by_hand(header: Any, claims: Any, sign: Any = lambda signed: b"") -> str:
    signed = f"{encoded(header)}.{encoded(claims)}"
    return f"{signed}.{encoded(sign(signed.encode())) or 'AA'}"


def claims_now(**changes: Any) -> dict[str, Any]:
    return {"iss": ISSUER, "aud": AUDIENCE, "sub": "pia", "exp": time.time() + 60, **changes}


def refused(token: str, key_set: KeySet, trusted: Issuer | None = None) -> str:
    with pytest.raises(PermissionDenied) as caught:
        verified(token, key_set, trusted)
    assert len(token) < 10 or token not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_good_token_is_taken(keys: dict[str, IssuerKey], algorithm: str) -> None:
    key = keys[algorithm]
    found = verified(key.token(groups=["a", "b", "a"]), jwks(key.jwk()))
    assert (found.principal, found.groups, found.source) == ("pia", ["a", "b"], "jwt:corp")
    assert found.registered
    left = found.expires_ns - time.time_ns()
    assert 50 * SECOND_NS < left <= 60 * SECOND_NS


def test_a_shared_secret_is_good_for_hs256(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    trusted = issuer(algorithms=["HS256"], jwks_file="", secret_file=str(path))
    token = jwt.encode(claims_now(), SECRET, "HS256")
    assert verified(token, load_keys(trusted), trusted).principal == "pia"
    assert "signature" in refused(jwt.encode(claims_now(), SECRET[::-1], "HS256"), load_keys(trusted), trusted)  # fmt: skip
    path.chmod(0o644)
    with pytest.raises(DanubeError, match="chmod 600"):
        load_keys(trusted)
    path.chmod(0o600)
    path.write_bytes(SECRET[:-1])
    with pytest.raises(InvalidArgument, match="too short"):
        load_keys(trusted)


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": PAST}, "expired"),
        ({"exp": 0}, "expired"),
        ({"nbf": FUTURE}, "not valid yet"),
        ({"iat": FUTURE}, "in the future"),
        ({"exp": "soon"}, "no time"),
        ({"exp": True}, "no time"),
        ({"exp": -1.0}, "no time"),
        ({"exp": 1e300}, "no time"),
        ({"exp": None}, "no end"),
        ({"nbf": None}, "no time"),
        ({"nbf": "now"}, "no time"),
        ({"iss": "https://evil.example.com/"}, "not trusted"),
        ({"iss": ISSUER[:-1]}, "not trusted"),
        ({"iss": [ISSUER]}, "not trusted"),
        ({"aud": "other"}, "audience"),
        ({"aud": ["other", "more"]}, "audience"),
        ({"aud": {"danube": 1}}, "audience"),
        ({"aud": None}, "audience"),
        ({"sub": None}, "not the name"),
        ({"sub": 7}, "not the name"),
        ({"sub": ""}, "not the name"),
        ({"sub": ".."}, "not the name"),
        ({"sub": "a/b"}, "not the name"),
        ({"sub": "a\nb"}, "not the name"),
        ({"sub": "x" * 129}, "not the name"),
        ({"sub": "bootstrap-admin"}, "reserved"),
        ({"groups": "admins"}, "no list"),
        ({"groups": [f"g{number}" for number in range(257)]}, "more than 256"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_claim_that_is_wrong_is_refused(
    keys: dict[str, IssuerKey], claims: dict[str, Any], reason: str
) -> None:
    key = keys["ES256"]
    relative = {
        name: time.time() + value if value in (PAST, FUTURE) else value
        for name, value in claims.items()
    }
    payload = json.dumps(claims_now(**relative)).encode()
    token = jwt.PyJWS().encode(payload, key.private, "ES256", {"kid": key.kid})
    assert reason in refused(token, jwks(key.jwk()))


@pytest.mark.parametrize("name", ["iss", "aud", "sub", "exp"])
def test_a_claim_that_is_missing_is_refused(keys: dict[str, IssuerKey], name: str) -> None:
    key = keys["ES256"]
    refused(key.token(without=(name,)), jwks(key.jwk()))


def test_a_little_difference_of_clocks_is_allowed(keys: dict[str, IssuerKey]) -> None:
    key, now = keys["ES256"], time.time()
    trusted = issuer(leeway_seconds=60)
    for claims in ({"exp": now - 30}, {"nbf": now + 30}, {"iat": now + 30}):
        found = verified(key.token(**claims), jwks(key.jwk()), trusted)
        assert found.expires_ns > time.time_ns()
    refused(key.token(exp=now - 90), jwks(key.jwk()), trusted)


def test_a_long_token_ends_sooner(keys: dict[str, IssuerKey]) -> None:
    key = keys["ES256"]
    trusted = issuer(lifetime_seconds_max=100)
    found = verified(key.token(exp=time.time() + 1e6), jwks(key.jwk()), trusted)
    assert found.expires_ns - time.time_ns() <= 100 * SECOND_NS


def test_no_signature_is_none(keys: dict[str, IssuerKey]) -> None:
    key_set = jwks(keys["RS256"].jwk())
    for algorithm in ("none", "None", "NONE", "", None, 7, ["RS256"], "HS256", "PS256", "RS512"):
        header = {"alg": algorithm, "kid": "one"}
        assert "not allowed" in refused(by_hand(header, claims_now()), key_set)
    head, payload, _ = keys["RS256"].token().split(".")
    for token in (f"{head}.{payload}.", f"{head}.{payload}", f"{head}.{payload}.AA.AA"):
        refused(token, key_set)
    assert "signature" in refused(f"{head}.{payload}.AA", key_set)


def test_a_public_key_is_never_a_secret(keys: dict[str, IssuerKey], tmp_path: Path) -> None:
    key = keys["RS256"]
    forms = [
        key.public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        key.public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        json.dumps(key.jwk()).encode(),
    ]
    for secret in forms:
        token = by_hand(
            {"alg": "HS256", "kid": "one"}, claims_now(),
            lambda signed, secret=secret: hmac.digest(secret, signed, hashlib.sha256),
        )  # fmt: skip
        assert "not allowed" in refused(token, jwks(key.jwk()))
    path = tmp_path / "issuers.toml"
    for algorithms in (["HS256"], ["HS256", "RS256"]):
        path.write_text(issuer_toml(algorithms=algorithms, jwks_file="keys.json"))
        with pytest.raises(InvalidArgument, match="secret_file, alone"):
            read_issuers(path)


def test_a_key_is_good_for_its_own_algorithm(keys: dict[str, IssuerKey]) -> None:
    listed = [keys[name].jwk(kid="one") for name in ("RS256", "ES256", "EdDSA")]
    key_set = jwks(*listed)
    for name, key in keys.items():
        assert verified(key.token(), key_set).principal == "pia"
        for other in keys:
            if other != name:  # signed by one kind, said to be of another
                head, payload, signature = key.token().split(".")
                head = encoded({"alg": other, "kid": "one"})
                assert "signature" in refused(f"{head}.{payload}.{signature}", key_set)


@pytest.mark.parametrize(
    "changes",
    [
        {"use": "enc"}, {"alg": "RS512"}, {"alg": "HS256"}, {"kty": "oct", "k": "c2VjcmV0"}, {"d": "AA"},
        {"key_ops": ["sign"]}, {"crv": "P-384"}, {"kid": 7}, {"kid": "x" * 257}, {"x": "!!"}, {"x": None},
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_are_of_no_use_are_left_out(
    keys: dict[str, IssuerKey], changes: dict[str, Any]
) -> None:
    wrong = keys["ES256"].jwk(**changes)
    with pytest.raises(InvalidArgument, match="have none"):
        jwks(wrong)
    assert len(jwks(wrong, keys["EdDSA"].jwk(kid="good"))) == 1


def test_a_weak_key_is_none() -> None:
    weak = rsa.generate_private_key(65537, 1024).public_key()
    made = jwt.get_algorithm_by_name("RS256").to_jwk(weak, as_dict=True)
    with pytest.raises(InvalidArgument):
        jwks(made)
    curve = ec.generate_private_key(ec.SECP384R1()).public_key()
    with pytest.raises(InvalidArgument):
        jwks(jwt.get_algorithm_by_name("ES384").to_jwk(curve, as_dict=True))


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"keys": 7}', b'{"keys": [7]}', b"[" * 10_000, b'{"keys": []}',
     json.dumps({"keys": [{"kty": "RSA"}] * 65}).encode()],
    ids=lambda content: content[:20].decode(),
)  # fmt: skip
def test_what_is_no_set_of_keys_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse_jwks(content, issuer())


def test_kids_name_keys(keys: dict[str, IssuerKey]) -> None:
    one, two = IssuerKey(kid="one"), IssuerKey(kid="two")
    key_set = jwks(one.jwk(), two.jwk())
    assert verified(two.token(), key_set).principal == "pia"
    assert "no such key" in refused(IssuerKey(kid="three").token(), key_set)
    assert "signature" in refused(IssuerKey(kid="one").token(), key_set)
    unnamed = jwt.encode(claims_now(), one.private, "ES256")
    assert "no such key" in refused(unnamed, key_set), "one of two keys is not guessed"
    assert verified(unnamed, jwks(one.jwk())).principal == "pia"
    for kid in (7, "x" * 300):
        token = by_hand({"alg": "ES256", "kid": kid}, claims_now())
        assert "kid" in refused(token, key_set)


@pytest.mark.parametrize(
    "token",
    [
        "", ".", "..", "a.b.c", "\u00e9.b.c", "a.b.c\n", "dfk.x.y", "x" * 20_000, "a." * 5000 + "a",
        f"{encoded(b'[' * 9000)}.{encoded(b'[' * 1000)}.AA", f"{encoded([])}.{encoded({})}.AA",
        by_hand({"alg": "ES256", "crit": ["exp"]}, {"iss": ISSUER}),
        by_hand({"alg": "ES256", "b64": False}, {"iss": ISSUER}),
        by_hand({"alg": "ES256"}, b'{"iss": "' + ISSUER.encode() + b'", "x": \xff}'),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_malformed_token_is_refused(keys: dict[str, IssuerKey], token: str) -> None:
    refused(token, jwks(keys["ES256"].jwk()))


@pytest.mark.parametrize("extension", [{"crit": ["exp"]}, {"b64": False}, {"b64": True}], ids=str)
def test_extensions_are_refused_though_the_signature_is_good(
    keys: dict[str, IssuerKey], extension: dict[str, Any]
) -> None:
    key = keys["ES256"]
    sign = jwt.get_algorithm_by_name("ES256").sign
    for more, is_good in (({}, True), (extension, False)):
        header = {"alg": "ES256", "kid": "one", **more}
        token = by_hand(header, claims_now(), lambda signed: sign(signed, key.private))
        if is_good:
            assert verified(token, jwks(key.jwk())).principal == "pia"
        else:
            assert "extensions" in refused(token, jwks(key.jwk()))


def test_names_stay_with_their_issuer(keys: dict[str, IssuerKey]) -> None:
    key = keys["ES256"]
    trusted = issuer(prefix="ci-", unregistered=True)
    found = verified(key.token(groups=["admins"]), jwks(key.jwk()), trusted)
    assert (found.principal, found.groups, found.registered) == ("ci-pia", ["ci-admins"], False)
    with pytest.raises(PermissionDenied, match="reserved"):
        verified(key.token(sub="admin"), jwks(key.jwk()), issuer(prefix="bootstrap-"))


# ---------------------------------------------------------------- the file of issuers


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"issuers\.toml is empty"),
        (
            "[[issuer]]\nname = 1",
            r"issuers\.toml: issuer\[0\]\.name must be text, not a whole number",
        ),
        ("issuer = 1", "issuer must be a list, not a whole number"),
        ("issuer = \xff", "no text in UTF-8"),
        ("issuer =", "no TOML: Invalid value"),
        (issuer_toml(), "give one of"),
        (issuer_toml(jwks_file="a", jwks_url="https://h/"), "give one of"),
        (issuer_toml(jwks_file="a", algorithms=["none"]), "no algorithm"),
        (issuer_toml(jwks_file="a", algorithms=[]), "algorithms"),
        (issuer_toml(secret_file="a", algorithms=["RS256"]), "secret_file, alone"),
        (issuer_toml(jwks_url="http://h/keys"), "https"),
        (issuer_toml(jwks_url="https://u:p@h/keys"), "user"),
        (issuer_toml(jwks_url="https://h:x/keys"), "no URL"),
        (issuer_toml(jwks_file="a", audience=[]), "audience"),
        (issuer_toml(jwks_file="a", name="a/b"), "name"),
        (issuer_toml(jwks_file="a", leeway_seconds=10_000), "leeway"),
        (issuer_toml(jwks_file="a", trust="all"), "trust"),
        (issuer_toml(jwks_file="a") * 2, "same name"),
        (issuer_toml(jwks_file="a") + issuer_toml(jwks_file="a", name="b"), "same issuer"),
    ],
    ids=range(19),
)
def test_a_wrong_file_of_issuers_says_what_is_wrong(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "issuers.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match=reason) as refused:
        read_issuers(path)
    assert "`" not in str(refused.value), "in words, not in those of a library"


def test_the_file_of_issuers_belongs_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "issuers.toml"
    path.write_text(issuer_toml(jwks_file="keys.json"))
    path.chmod(0o644)
    (found,) = read_issuers(path)
    assert found.jwks_file == str(tmp_path / "keys.json")
    path.chmod(0o664)
    with pytest.raises(DanubeError, match="chmod go-w"):
        read_issuers(path)
    with pytest.raises(DanubeError, match="missing"):
        read_issuers(tmp_path / "missing.toml")


# ---------------------------------------------------------------- keys from a URL


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JwksServer]:
    made = JwksServer(tmp_path)
    yield made
    made.close()


def at(server: JwksServer, **changes: Any) -> Issuer:
    ca = str(server.certificate.certificate)
    fields = {"jwks_file": "", "jwks_url": server.url, "jwks_ca": ca, **changes}
    return issuer(**fields)


def test_keys_are_fetched(server: JwksServer, keys: dict[str, IssuerKey]) -> None:
    server.serve(keys["ES256"].jwk())
    assert len(load_keys(at(server))) == 1


@pytest.mark.parametrize(
    ("status", "headers", "more"),
    [
        (301, {"Location": "/elsewhere"}, b""),
        (302, {"Location": "https://127.0.0.1:1/"}, b""),
        (500, {}, b""),
        (203, {}, b""),
        (200, {}, b" " * (256 * 1024)),
        (200, {"Content-Length": "10000"}, b""),
        (200, {}, b"<html>"),
    ],
    ids=["moved", "redirect", "failing", "other", "huge", "cut", "page"],
)
def test_a_strange_answer_gives_no_keys(
    server: JwksServer,
    keys: dict[str, IssuerKey],
    status: int,
    headers: dict[str, str],
    more: bytes,
) -> None:
    server.serve(keys["ES256"].jwk())
    server.answer = (status, headers, server.answer[2] + more)  # with keys that would be good
    with pytest.raises((Unavailable, InvalidArgument)):
        load_keys(at(server))
    assert server.requests == 1


def test_a_server_that_no_one_vouches_for_gives_no_keys(
    server: JwksServer, keys: dict[str, IssuerKey]
) -> None:
    server.serve(keys["ES256"].jwk())
    with pytest.raises(Unavailable, match="certificate"):
        load_keys(at(server, jwks_ca=""))
    with pytest.raises(Unavailable):
        load_keys(at(server, jwks_url=server.url.replace("127.0.0.1", "localhost")))
    assert server.requests == 0


def test_a_server_that_stalls_is_left(server: JwksServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danube_fast.security.jwks.FETCH_SECONDS", 0.5)
    server.stall.clear()
    began = time.monotonic()
    with pytest.raises(Unavailable):
        load_keys(at(server))
    assert time.monotonic() - began < 4.0, "the bound of one read is 5 s"


class Watch(SystemClock):
    """A clock that can be moved on."""

    def __init__(self) -> None:
        self.more_ns = 0

    def monotonic_ns(self) -> int:  # type: ignore[override]
        return time.monotonic_ns() + self.more_ns


def test_keys_are_kept_for_a_while(keys: dict[str, IssuerKey]) -> None:
    clock, loads, key = Watch(), [], keys["ES256"]
    trusted = issuer(stale_seconds=60)
    faults: list[DanubeError] = []
    token = TokenVerifier([trusted]).open(key.token())
    unknown = TokenVerifier([trusted]).open(IssuerKey(kid="other").token())

    def load(_: Issuer) -> KeySet:
        loads.append(1)
        if faults:
            raise faults[0]
        return jwks(key.jwk())

    async def play() -> None:
        cache = KeyCache(trusted, clock, load)
        found = await asyncio.gather(*[cache.find(token) for _ in range(20)])
        assert None not in found and len(loads) == 1, "asked together, loaded once"
        assert await cache.find(unknown) is None and len(loads) == 1, "not so soon again"
        clock.more_ns += key_cache.RELOAD_NS
        faults.append(Unavailable("down"))
        assert await cache.find(unknown) is None and len(loads) == 2
        assert await cache.find(token) is not None, "the old keys are good meanwhile"
        clock.more_ns += 61 * SECOND_NS
        with pytest.raises(Unavailable):
            await cache.find(token)
        faults.clear()
        clock.more_ns += key_cache.RELOAD_NS
        assert await cache.find(token) is not None
        assert len(loads) == 4

    asyncio.run(play())


def test_keys_are_loaded_again_by_themselves(keys: dict[str, IssuerKey]) -> None:
    loads: list[int] = []

    def load(_: Issuer) -> KeySet:
        loads.append(1)
        if len(loads) < 3:
            raise RuntimeError("not what was foreseen")
        return jwks(keys["ES256"].jwk())

    async def play() -> None:
        cache = KeyCache(issuer(), SystemClock(), load)
        task = asyncio.create_task(cache.keep_fresh())
        token = TokenVerifier([issuer()]).open(keys["ES256"].token())
        deadline = time.monotonic() + 30
        while cache._find(token) is None:
            assert time.monotonic() < deadline and not task.done(), "no keys within 30 s"
            await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(play())
    assert len(loads) == 3
