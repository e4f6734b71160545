"""Checks of `doctor` on who may do what: addresses, files with secrets, certificates, and the records of a secured broker."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danube_fast.cli.host import Finding, Verdict
from danube_fast.config import Settings, split_address
from danube_fast.errors import DanubeError, InvalidArgument, PermissionDenied
from danube_fast.security.audit import shown_time

if TYPE_CHECKING:
    from danube_fast.security.issuers import Issuer

__all__ = ["addresses", "files", "named_files", "records"]

OK, WARNING, FAILURE = Verdict.OK, Verdict.WARNING, Verdict.FAILURE
DAY_NS = 24 * 3600 * 1_000_000_000
EXPIRY_DAYS = 7
NAMES_MAX = 5
_CERTIFICATE_SETTINGS = {
    "tls_certificate": ("certificate of the HTTPS ports", FAILURE),
    "tls_client_ca": ("CAs of clients", WARNING),
    "tls_client_crl": ("revoked certificates of clients", FAILURE),
}
"""Setting that names a file -> what that is, and how bad it is when the first of it has expired."""
SOON_DAYS = 30
SOON_SHARE = 3
"""What ends within so many days, and within one part in so many of its whole time, ends soon."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ALL_OTHERS = stat.S_IRWXO
_WRITE_OTHERS = stat.S_IWGRP | stat.S_IWOTH


# ---------------------------------------------------------------- addresses


def addresses(
    auth: str, listen: str, admin: str, *, tls: bool = False, sign_on: str = ""
) -> Iterator[Finding]:
    """Say who reaches a broker with these settings, and what is asked there."""
    is_here = _is_loopback(listen, "--listen")
    if auth != "none":
        keys = "keys that are registered or signed on" if sign_on else "registered keys"
        yield Finding("tcp", OK, f"{_shown(listen)}: {keys} only, encrypted")
        seen = "local users that are registered (uid:NUMBER), as the kernel says"
    else:
        reach = "program of this host" if is_here else "host of the network"
        advice = "" if is_here else "give --auth required, or an address of this host"
        seen = f"{_shown(listen)}: every {reach} may do everything"
        yield Finding("tcp", OK if is_here else FAILURE, seen, advice)
        seen = "every user of this network namespace may do everything over ipc, the broker's own over shared memory"
    yield Finding("ipc, shared memory", OK, seen)
    where = (
        "a port that the system chooses"
        if _has_no_port(listen)
        else "the port after that of --listen"
    )
    yield _admin_port(auth, admin, f"loopback, {where}", tls)
    if sign_on:
        yield Finding("sign-on", OK, f"{_shown(sign_on)}: HTTPS, for API keys and tokens")


def _has_no_port(address: str) -> bool:
    return split_address(address, "the address")[1] == 0


def _shown(address: str) -> str:
    """Write an address for people; settings with port 0 do not tell the port in use."""
    if not _has_no_port(address):
        return address
    return f"{address.rpartition(':')[0]}, a port that the system chooses"


def _admin_port(auth: str, admin: str, unset: str, tls: bool) -> Finding:
    """Say who reaches health and metrics. `unset`: where they are if `admin` is empty."""
    is_here = not admin or _is_loopback(admin, "--admin")
    where = f"{_shown(admin) if admin else unset} ({'HTTPS' if tls else 'HTTP'})"
    if auth == "none":
        seen = f"{where}: health and metrics, for every {'program of this host' if is_here else 'host'}"
        advice = (
            "" if is_here else "leave it on loopback, or give --auth required and a certificate"
        )
        return Finding("admin port", OK if is_here else FAILURE, seen, advice)
    seen = f"{where}: health for all, metrics for users who have lookup on the cluster"
    if is_here or tls:
        return Finding("admin port", OK, seen)
    advice = "API keys pass unencrypted: leave it on loopback, or set tls_certificate and tls_key"
    return Finding("admin port", WARNING, seen, advice)


def _is_loopback(address: str, option: str) -> bool:
    import ipaddress

    host, _ = split_address(address, option)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---------------------------------------------------------------- files


def files(settings: Settings) -> Iterator[Finding]:
    """Look at the files of a data directory that hold secrets, and at what waits in it."""
    from danube_fast.security.server_keys import is_secured
    from danube_fast.workers.supervisor.contents import SECRET_FILES, open_names

    folder = Path(settings.data_dir).absolute()
    if not folder.is_dir():
        return
    yield _folder(folder)
    if names := open_names(folder, _WRITE_OTHERS):
        yield Finding(
            "files", FAILURE, f"others may write to {_some(names)}",
            f"see that all in {folder} is yours, and run chmod -R go-w {folder}",
        )  # fmt: skip
    for name, what in SECRET_FILES.items():
        if os.path.lexists(folder / name):
            yield _secret(folder / name, what)
    if os.path.lexists(folder / "bootstrap-admin.key"):
        yield _first_key(folder / "bootstrap-admin.key")
    if not is_secured(folder):
        return
    yield _rotation(folder)
    if settings.auth == "none":
        yield Finding(
            "auth", WARNING, f"{folder} is of a secured broker, and these settings ask no one who they are",
            "give the settings that it is served with (--config FILE, DANUBE_AUTH=required), or --url of the broker",
        )  # fmt: skip


def named_files(settings: Settings, now_ns: int) -> Iterator[Finding]:
    """Look at the files that settings name: keys, certificates and when they end, issuers of tokens and their secrets."""
    for name, (what, expired) in _CERTIFICATE_SETTINGS.items():
        if path := str(getattr(settings, name)):
            yield _dated(Path(path), what, expired, now_ns)
    if settings.tls_client_crl:
        yield from _unlisted(Path(settings.tls_client_ca), Path(settings.tls_client_crl))
    if settings.tls_key:
        yield _secret(Path(settings.tls_key), "the key of the certificate", 0o037)
    if settings.tokens:
        yield from _issuers(Path(settings.tokens))


def _dated(path: Path, what: str, expired: Verdict, now_ns: int) -> Finding:
    """Say until when the first of what is in a PEM file is good, and that it is `expired` if it was."""
    from danube_fast.security.tls import dates_in

    found = _file(path, what, stat.S_IWOTH, "chmod o-w")
    if found.verdict is not OK:
        return found
    try:
        dates = dates_in(path.read_bytes())
    except (DanubeError, OSError) as error:
        return Finding(path.name, FAILURE, f"{what}: {error}")
    if not dates:
        return Finding(path.name, FAILURE, f"{what}: it holds none", "write it anew, in PEM")
    ending = [(end_ns, begin_ns) for begin_ns, end_ns in dates if end_ns]
    if not ending:
        return Finding(path.name, OK, f"{found.seen}, without an end")
    end_ns, begin_ns = min(ending)
    left_ns = end_ns - now_ns
    seen = (
        f"{found.seen}, {'the first ends' if len(dates) > 1 else 'ends'} {shown_time(end_ns)[:10]}"
    )
    if left_ns <= 0:
        advice = "renew it, and write the file anew"
        return Finding(path.name, expired, f"{seen}: it has expired", advice)
    seen += f", in {left_ns // DAY_NS} days"
    if left_ns < min(SOON_DAYS * DAY_NS, (end_ns - begin_ns) // SOON_SHARE):
        return Finding(path.name, WARNING, seen, "renew it in time, and write the file anew")
    return Finding(path.name, OK, seen)


def _unlisted(cas: Path, crls: Path) -> Iterator[Finding]:
    """Say whether lists of revoked certificates are of no CA of clients, and whether a CA has none; nothing if the files
    cannot be read."""
    from danube_fast.security.revocations import cas_without_list, check_lists, crls_in

    if not (cas.is_file() and crls.is_file()):  # a FIFO would wait for its writer
        return
    try:
        known, listed = cas.read_bytes(), crls.read_bytes()
        count = cas_without_list(known, listed)
        ders = crls_in(listed)
    except (DanubeError, OSError):  # said of the file itself
        return
    try:
        check_lists(ders, known)
    except DanubeError as error:
        seen = f"{crls} with {cas}: {error}"
        advice = "a start is refused, a running broker keeps the lists before: give lists that these CAs have signed"
        yield Finding("lists of revoked certificates", FAILURE, seen, advice)
    if count:
        seen = f"{count} of {cas} have no list in {crls}: all their clients are refused"
        advice = "add the list of revoked certificates (CRL) of each, or take the CA out"
        yield Finding("CAs of clients", FAILURE, seen, advice)


def _issuers(path: Path) -> Iterator[Finding]:
    """Look at the file of issuers, and at the files that it names."""
    from danube_fast.security.issuers import read_issuers
    from danube_fast.security.jwks import check_files
    from danube_fast.security.tokens import TokenVerifier

    found = _file(path, "trusted issuers of tokens", _WRITE_OTHERS, "chmod go-w")
    if found.verdict is OK and path.stat().st_uid not in (0, os.geteuid()):
        seen = f"{found.seen}, of another user: what it names was not looked at"
        found = Finding(path.name, WARNING, seen, "run this as the user of the broker, who must own it")  # fmt: skip
    yield found
    if found.verdict is not OK:
        return
    try:
        issuers = read_issuers(path)
    except DanubeError as error:
        yield Finding(path.name, FAILURE, str(error))
        return
    named = [each for issuer in issuers for each in _of_issuer(issuer)]
    yield from named
    if all(each.verdict is OK for each in named):
        try:
            TokenVerifier(issuers)
            for issuer in issuers:
                check_files(issuer)
        except DanubeError as error:
            yield Finding("trusted issuers", FAILURE, str(error))


def _of_issuer(issuer: Issuer) -> Iterator[Finding]:
    """Look at the files that an issuer names, not into them."""
    if issuer.secret_file:
        yield _secret(Path(issuer.secret_file), f"shared with the issuer {issuer.name}")
    for file, what in ((issuer.jwks_file, "keys"), (issuer.jwks_ca, "CAs")):
        if file:
            what = f"{what} of the issuer {issuer.name}"
            yield _file(Path(file), what, _WRITE_OTHERS, "chmod go-w")


def _folder(folder: Path) -> Finding:
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    seen = f"{folder}, mode {mode:04o}, of user {found.st_uid}"
    if mode & _WRITE_OTHERS:
        return Finding(
            "data directory", FAILURE, f"{seen}: others may write", f"chmod 750 {folder}"
        )
    if mode & _ALL_OTHERS:
        return Finding(
            "data directory", WARNING, f"{seen}: all may look into it, and messages are not encrypted there",
            f"chmod 750 {folder}",
        )  # fmt: skip
    return Finding("data directory", OK, seen)


def _secret(path: Path, what: str, others: int = _OTHERS) -> Finding:
    lost = "; if another user may have read it, make a new one"
    return _file(path, f"secret: {what}", others, "chmod 600", lost)


def _file(path: Path, what: str, others: int, remedy: str, lost: str = "") -> Finding:
    """Say whether a file is there, for this user to read, and without the bits `others` in its mode."""
    try:
        found = path.stat()
    except OSError as error:
        advice = f"put {path} back, or name another file"
        return Finding(path.name, FAILURE, f"{what}: {error.strerror}", advice)
    mode = stat.S_IMODE(found.st_mode)
    seen = f"{what}, mode {mode:04o}"
    if not stat.S_ISREG(found.st_mode):
        advice = f"name a file instead of {path}"
        return Finding(path.name, FAILURE, f"{what}: it is no file", advice)
    if mode & others:
        return Finding(path.name, FAILURE, seen, f"{remedy} {path}{lost}")
    if not os.access(path, os.R_OK):
        seen = f"{seen}, of user {found.st_uid}: this user cannot read it"
        advice = "run this as the user of the broker; if that is this one, give it the file"
        return Finding(path.name, FAILURE, seen, advice)
    return Finding(path.name, OK, seen)


def _first_key(path: Path) -> Finding:
    from danube_fast.security.curve import read_key_file

    try:
        read_key_file(path)
    except DanubeError as error:
        return Finding(
            "first administrator",
            WARNING,
            f"no key waits for its first use: {error}",
            f"see to {path}, or remove it",
        )
    return Finding(
        "first administrator", WARNING, f"{path.name} has a key, which is an administrator's until its first use",
        "use it, to make an administrator of your own: who reads it is administrator once; if it does not let you in, remove it",
    )  # fmt: skip


def _rotation(folder: Path) -> Finding:
    from danube_fast.security.server_keys import SERVER_KEY, ServerKeys

    if not os.path.lexists(folder / SERVER_KEY):
        return Finding(
            SERVER_KEY, FAILURE, "it is gone, and clients know this broker by it: a start is refused",
            f"put it back from a backup (0600), or: danube-fast security recover --data-dir {folder} --new-server-key --yes",
        )  # fmt: skip
    try:
        keys = ServerKeys(folder)
        keys.check_known()
        rotation = keys.rotation()
    except DanubeError as error:
        return Finding("server key", FAILURE, str(error))
    return _stage(rotation.stage.value, rotation.keys)


def _stage(stage: str, keys: list[str]) -> Finding:
    if len(keys) < 2:
        return Finding("server key", OK, f"{' '.join(keys)}; clients pin it")
    seen = f"its rotation is {stage}; clients pin {' and '.join(keys)}"
    step = "activate" if stage == "prepared" else "retire"
    return Finding(
        "server key", WARNING, seen, f"when all clients do: danube-fast security server-key {step}"
    )  # fmt: skip


# ---------------------------------------------------------------- records


def records(client: Any, status: dict[str, Any], now_ns: int) -> Iterator[Finding]:
    """Look at the records of a running broker: what waits, ends soon, or is switched off."""
    if listen := status.get("listen"):
        yield from addresses(
            status.get("auth", "none"), listen, status.get("admin", ""),
            tls=status.get("tls", False), sign_on=status.get("sign_on", ""),
        )  # fmt: skip
    if status.get("auth", "none") == "none":
        return
    if fault := status.get("tls_fault"):
        yield Finding(
            "TLS files",
            FAILURE,
            fault,
            "repair what it names; where newer files cannot be used, those before count until then",
        )
    if fault := status.get("sign_on_fault"):
        yield Finding(
            "sign-on", FAILURE, f"no client can sign on: {fault}",
            "repair that; it is tried again within seconds, and registered keys come in meanwhile",
        )  # fmt: skip
    if fault := status.get("issuers_fault"):
        yield Finding(
            "trusted issuers", FAILURE, f"their newest files are not all in use: {fault}",
            "repair it"
            + ("" if fault.startswith("no token counts") else ": what was in use before counts until then, unless the "
            "process of sign-on has started again"),
        )  # fmt: skip
    try:
        key = client.admin.describe_server_key()
        yield _stage(key["stage"], key["keys"])
        credentials = client.admin.list_security(record_kind="credential")
        principals = client.admin.list_security(record_kind="principal")
    except PermissionDenied:
        yield Finding(
            "rights", OK, "not shown to this user: only manage_cluster sees who may do what"
        )
        return
    if any(row["principal"] == "bootstrap-admin" for row in credentials):
        yield Finding(
            "first administrator", WARNING, "the key of an administrator waits for its first use",
            "use it, to make an administrator of your own",
        )  # fmt: skip
    yield _expiry("keys", credentials, "credential", now_ns)
    try:
        api_keys = client.admin.list_security(record_kind="api_key")
    except InvalidArgument:
        api_keys = []
    if api_keys:
        yield _expiry("API keys", api_keys, "id", now_ns)
    off = [row["name"] for row in principals if row.get("disabled")]
    seen = f"{len(principals)}" + (f", {len(off)} disabled: {_some(off)}" if off else "")
    yield Finding("users", OK, seen)


def _expiry(check: str, rows: list[dict[str, Any]], name: str, now_ns: int) -> Finding:
    """Say which keys have ended, and which end soon."""
    ends = [(row["expires_ns"], str(row[name])) for row in rows if row.get("expires_ns")]
    over = [text for at_ns, text in ends if at_ns <= now_ns]
    soon = [text for at_ns, text in ends if now_ns < at_ns <= now_ns + EXPIRY_DAYS * DAY_NS]
    seen = f"{len(rows)} registered"
    if over:
        seen += f", {len(over)} ended: {_some(over)}"
    if soon:
        return Finding(
            check, WARNING, f"{seen}, {len(soon)} end within {EXPIRY_DAYS} days: {_some(soon)}",
            f"register new ones beside them: danube-fast security {'tokens' if name == 'id' else 'keys'} add",
        )  # fmt: skip
    return Finding(check, OK, seen)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(sorted(names)[:NAMES_MAX]) + more
