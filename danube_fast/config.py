"""The one Settings struct, and where its values come from: what a user may tune, nothing else.

Components (clock, stores, transport) are passed in, never configured here. Every field has its unit in
its name, and below it what it does: the table in tuning.md is made of these sentences. A value is taken from
the first of these that gives it:

    flag  >  DANUBE_* environment variable  >  TOML file  >  default

and `danube-fast config show` prints each value with the place it came from.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from danube_fast.checks import parse_amount, shown_value, unit_of
from danube_fast.errors import InvalidArgument, NotFound

__all__ = ["LoadedSettings", "Settings", "load_settings", "parse_setting", "split_address"]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
HOUR_MS = 3600 * 1000
YEAR_SECONDS = 366 * 24 * 3600

PORT_MAX = 65535
ENVIRONMENT_PREFIX = "DANUBE_"
ENVIRONMENT_OTHERS = frozenset(
    {
        "DANUBE_CONFIG",
        "DANUBE_CONTEXT",
        "DANUBE_KERNELS",
        "DANUBE_KEY_FILE",
        "DANUBE_MALLOC",
        "DANUBE_PLAIN_CRC",
        "DANUBE_PLAIN_FRAMES",
        "DANUBE_SERVER_KEY",
        "DANUBE_SERVER_UID",
        "DANUBE_TEST_RUN",
        "DANUBE_TLS",
        "DANUBE_TOKEN_FILE",
        "DANUBE_URL",
    }
)
"""Variables with our prefix that are no settings."""
CLIENT_MARK = "://"
"""DANUBE_SIGN_ON that has it is where clients sign on; without it, as HOST:PORT, it is where a broker serves sign-on."""
RESEMBLANCE_MIN = 0.75
"""From here on an unknown DANUBE_* variable is taken for a misspelt setting."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a broker. Defaults are right for one host."""

    # where
    data_dir: Annotated[str, Meta(min_length=1)] = "danube-data"
    """Folder of logs and metadata, on a local disk."""
    listen: str = "127.0.0.1:6650"
    """HOST:PORT where clients begin. Worker i listens on PORT + 2 + i; with port 0 the system chooses all ports. Other
    addresses than loopback need `auth`, or `insecure` in a network that you trust."""
    advertise: str = ""
    """HOST that clients are told to connect to. Empty: the one of `listen`."""
    admin: str = ""
    """HOST:PORT of `/healthz`, `/readyz` and `/metrics`. Empty: loopback, at the port after that of `listen`."""
    workers: Annotated[int, Meta(ge=1, le=256)] = 2
    """Processes that hold logs and partitions."""
    log_format: Annotated[str, Meta(pattern="^(text|json)$")] = "text"
    """Form of what the broker logs to stderr: `text` or `json`."""

    # security
    auth: Annotated[str, Meta(pattern="^(none|required)$")] = "none"
    """`required`: clients prove who they are, and may do what roles allow; CURVE on tcp, the kernel's word for local
    users. `none`: all who reach the broker may do everything, so it listens on loopback."""
    authorizer: str = ""
    """NAME or NAME:TEXT of an authorizer of another package (entry point group `danube_fast.authorizers`), which can
    take away what roles allow. Empty: roles alone decide."""
    sign_on: str = ""
    """HOST:PORT where clients sign on by HTTPS with an API key or a token, in a process of its own. Needs `auth`,
    `tls_certificate` and `tls_key`. Empty: there is no sign-on."""
    tokens: str = ""
    """TOML file of the issuers whose tokens (JWT) `sign_on` takes. Empty: no tokens (JWT) count."""
    authenticator: str = ""
    """NAME or NAME:TEXT of an authenticator of another package (entry point group `danube_fast.authenticators`), which
    `sign_on` asks about secrets that are no API key and no token of `tokens`. Empty: there is none."""
    authenticator_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.@-]{0,100}\Z")] = ""
    """Put in front of the names of users and groups that `authenticator` tells, so that it cannot speak for others."""
    authenticator_unregistered: bool = False
    """Users that `authenticator` tells need no record: their rights come from bindings of their names and groups."""
    tls_certificate: str = ""
    """PEM file with the certificate of the HTTPS ports, and those between it and its CA. With `tls_key` it gives the admin
    port TLS, and with `auth` the admin port may then be on any address. A changed file is taken within seconds."""
    tls_key: str = ""
    """PEM file with the private key of `tls_certificate`, mode 0600 or 0640, without a password."""
    tls_client_ca: str = ""
    """PEM file with CAs of clients: their certificates may prove who they are on the HTTPS ports, each when it is
    registered, or its subject is (`danube-fast security keys add`). Empty: clients are asked for none."""
    tls_client_crl: str = ""
    """PEM file with the lists of revoked certificates (CRL) of the CAs in `tls_client_ca`, one for each and signed by it: a
    certificate is refused if a CA of its chain has none there, or an expired one. A changed file is taken within seconds.
    Empty: none are revoked."""
    insecure: bool = False
    """`auth` is `none`, and the broker listens on other addresses than loopback, or starts on the data directory of one that
    had `auth`, all the same."""
    audit: Annotated[str, Meta(pattern="^(auto|on|off)$")] = "auto"
    """Administrative changes and denied actions are recorded in `DATA_DIR/audit`: `on`, `off`, or `auto`: where `auth` is
    `required`. A change that cannot be recorded is refused."""
    audit_file_bytes: Annotated[int, Meta(ge=64 * KIB, le=16 * GIB)] = 64 * MIB
    """Size of a file of the audit log; a larger one is closed, and another one begun."""
    audit_files: Annotated[int, Meta(ge=2, le=100_000)] = 16
    """Files of the audit log that are kept; then the oldest goes."""
    admin_changes_per_second_max: Annotated[int, Meta(ge=0, le=1_000_000)] = 100
    """Administrative changes that one user without `manage_cluster` may make where there is an audit log, those of ten
    seconds at once; one with a record above 1 KiB counts as several. 0: unbounded."""

    # log
    segment_bytes: Annotated[int, Meta(ge=64 * KIB, le=16 * GIB, multiple_of=4096)] = 128 * MIB
    """Size of a segment of a log that holds much. Space comes back by whole segments."""
    segment_start_bytes: Annotated[int, Meta(ge=64 * KIB, le=16 * GIB, multiple_of=4096)] = 4 * MIB
    """Size of the first segments of a log. Later ones are four times as large as what the log holds, up to
    `segment_bytes`."""
    spare_segments: Annotated[int, Meta(ge=0, le=64)] = 2
    """Segments that are kept ready for each log. Raise it for bursts."""
    wal_bytes_max: Annotated[int, Meta(ge=0)] = 0
    """Bound of all logs together. 0: the smaller of 100 GiB and half of the free disk."""
    group_bytes_max: Annotated[int, Meta(ge=64 * KIB, le=64 * MIB)] = 4 * MIB
    """Most that is written and synced at once."""
    durable_writes: Annotated[str, Meta(pattern="^(auto|fdatasync|dsync|direct)$")] = "auto"
    """How small groups are made durable: by a write and `fdatasync`, or by one write, with RWF_DSYNC (`dsync`) or around
    the page cache (`direct`, O_DIRECT and O_DSYNC). `auto`: what a probe at the start finds best; `danube-fast doctor`
    prints the times."""
    page_cache_bytes: Annotated[int, Meta(ge=0, le=16 * TIB)] = 64 * MIB
    """Newest bytes of each log that stay in the system's page cache though every subscription has passed them; at least
    `tail_bytes_max`. Raise it for consumers that come late."""
    idle_marker_ms: Annotated[int, Meta(ge=1, le=HOUR_MS)] = 100
    """After so long without writes a log records how far it is durable."""
    retention_seconds_min: Annotated[int, Meta(ge=0, le=100 * YEAR_SECONDS)] = 24 * 3600
    """Messages stay at least so long, acked or not, unless the topic's policy says otherwise."""
    index_flush_entries: Annotated[int, Meta(ge=1, le=10_000_000)] = 4096
    """Entries of the index that are written at once. Fewer are replayed after a kill."""
    index_map_bytes: Annotated[int, Meta(ge=MIB, le=16 * TIB)] = MIB
    """First size of an index's memory map and its file. Both grow by themselves."""

    # history
    store: str = ""
    """URL of the object store of the broker's history: `file:///DIR`, `s3://BUCKET/PREFIX`. Topics with retention
    `forever` or `until_expired` are uploaded there, and may become larger than the disk. Empty: there is no history."""
    history_object_bytes: Annotated[int, Meta(ge=64 * KIB, le=16 * GIB)] = 256 * MIB
    """Size of an object of history, about."""
    history_part_bytes: Annotated[int, Meta(ge=64 * KIB, le=64 * MIB)] = 8 * MIB
    """Larger objects are sent in parts of this size, several at a time."""
    history_backlog_bytes_max: Annotated[int, Meta(ge=0)] = 0
    """Bytes of a worker's topics with history that may wait for the store. Above it publishes to them are refused. 0:
    half of the room of its logs."""
    history_flush_seconds: Annotated[int, Meta(ge=1, le=YEAR_SECONDS)] = 3600
    """A message is in the store so long after it was published, at the latest."""
    history_delete_seconds: Annotated[int, Meta(ge=1, le=YEAR_SECONDS)] = 24 * 3600
    """Objects of a deleted topic, and others that are needed no more, are deleted within that time."""
    history_throttle_bytes_per_s: Annotated[int, Meta(ge=0, le=TIB)] = 0
    """Most that is uploaded in a second. 0: as fast as the store is."""
    history_cache_bytes: Annotated[int, Meta(ge=MIB, le=16 * TIB)] = 1 * GIB
    """Bytes of history on this disk that consumers read just now."""

    # messages
    message_bytes_max: Annotated[int, Meta(ge=KIB, le=GIB)] = 16 * MIB
    """Largest message. A larger one is refused."""
    auto_create_topics: bool = True
    """The first producer of a topic makes it."""
    partitions_per_topic_max: Annotated[int, Meta(ge=1, le=65_536)] = 4096
    """Most partitions of a topic."""

    # sessions
    handshake_timeout_ms: Annotated[int, Meta(ge=100, le=HOUR_MS)] = 5000
    """A connection that has not said hello by then is closed."""
    handshakes_failed_per_second_max: Annotated[int, Meta(ge=0, le=1_000_000)] = 100
    """Handshakes of one address over tcp that fail at a process in a second, with `auth`: keys that are refused, and what
    ends before a key is known. With more, new connections of the address wait for a second. Connections that end without
    a byte, like probes of load balancers, count a tenth. 0: any number, for brokers behind a proxy of tcp, where all
    clients have one address."""
    heartbeat_ms: Annotated[int, Meta(ge=10, le=HOUR_MS)] = 500
    """How often clients that consume or publish show life."""
    heartbeat_idle_ms: Annotated[int, Meta(ge=10, le=HOUR_MS)] = 15_000
    """How often all other clients show life."""
    session_timeout_ms: Annotated[int, Meta(ge=50, le=HOUR_MS)] = 2500
    """A consuming client that was silent for so long counts as dead: its messages go to others."""
    sessions_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 20_000
    """Clients of one process."""
    sessions_per_principal_max: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Clients of one user at one process; without `auth` all are one user. 0: as many as `sessions_max`."""
    shm_ring_bytes: Annotated[int, Meta(ge=0, le=512 * MIB)] = 4 * MIB
    """Each of the two rings of a client on this host, rounded up to a power of two. 0: no shared memory."""
    shm_clients_max: Annotated[int, Meta(ge=1, le=65_536)] = 256
    """Clients of one worker that have rings. Others use ZeroMQ."""
    shm_huge_pages: bool = False
    """Rings of 2 MiB or more ask for huge pages. The kernel's `shmem_enabled` must allow them."""

    # dedup
    producers_max: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    """Producers whose sequences a worker remembers. The one used longest ago is forgotten first."""
    producer_expiry_seconds: Annotated[int, Meta(ge=1, le=100 * YEAR_SECONDS)] = 7 * 24 * 3600
    """A producer that was not used for so long is forgotten."""
    reply_topic_expiry_seconds: Annotated[int, Meta(ge=1, le=100 * YEAR_SECONDS)] = 600
    """A reply topic that was not read for so long is deleted: its client was killed."""
    compaction_keys_max: Annotated[int, Meta(ge=1, le=100_000_000)] = 1_000_000
    """Keys that one pass over a compacted topic remembers, about 100 bytes each and the key."""
    compaction_tombstone_seconds: Annotated[int, Meta(ge=0, le=100 * YEAR_SECONDS)] = 24 * 3600
    """A message without payload in a compacted topic goes so long after it has removed its key."""

    # delivery
    tail_bytes_max: Annotated[int, Meta(ge=0, le=TIB)] = 64 * MIB
    """Recent frames that a worker keeps in memory for consumers near the tail."""
    memory_topic_bytes_max: Annotated[int, Meta(ge=64 * KIB, le=TIB)] = 256 * MIB
    """Unacked bytes of each partition of a topic with durability `memory`. Above it publishes to it are refused."""
    delivery_bytes_max: Annotated[int, Meta(ge=4 * KIB, le=GIB)] = 1 * MIB
    """Most that goes to a client in one DELIVER, unless one frame alone is larger."""

    # balance
    rebalance: Annotated[str, Meta(pattern="^(off|conservative|balanced|aggressive)$")] = (
        "conservative"
    )
    """How readily partitions leave a busy worker by themselves: `off`, `conservative`, `balanced` or `aggressive`."""
    rebalance_seconds: Annotated[int, Meta(ge=0, le=24 * 3600)] = 0
    """How long an imbalance must last, and the pause after a move. 0: 30, 15 or 5, as the strategy says."""
    rebalance_moves_per_hour: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Moves in an hour at most. 0: 12, 60 or 360, as the strategy says."""
    rebalance_bytes_max: Annotated[int, Meta(ge=0, le=16 * TIB)] = 1 * GIB
    """A partition with more in the log does not move by itself: all of it would be copied."""

    # metrics
    metrics_topics_max: Annotated[int, Meta(ge=0, le=1000)] = 100
    """Topics, and as many subscriptions and namespaces, that have labels of their own on `/metrics`. 0: none."""

    # processes
    spin_us: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """A worker that has nothing to do looks on for so long before it sleeps."""
    pin: bool = False
    """Each worker stays on a core of its own."""
    mailbox_bytes: Annotated[int, Meta(ge=64 * KIB, le=GIB)] = 1 * MIB
    """Ring between two processes of the broker."""
    stop_timeout_ms: Annotated[int, Meta(ge=100, le=HOUR_MS)] = 10_000
    """How long an orderly stop may take before processes are killed."""
    worker_start_timeout_ms: Annotated[int, Meta(ge=1000, le=HOUR_MS)] = 60_000
    """A process that starts and shows no life for so long is killed and started again."""
    heartbeat_timeout_ms: Annotated[int, Meta(ge=2000, le=HOUR_MS)] = 10_000
    """A ready process that shows no life for so long is killed and started again."""
    restart_delay_ms: Annotated[int, Meta(ge=0, le=HOUR_MS)] = 100
    """Pause before a process is started again that has died within 10 s of its start. It doubles each time; one that has
    run for longer is started again at once."""


class LoadedSettings(NamedTuple):
    """Settings, where each value came from, and the DANUBE_* variables that mean nothing here."""

    settings: Settings
    sources: dict[str, str]
    """Field name -> "flag --workers", "DANUBE_WORKERS", a file's path, or "default"."""
    ignored_variables: list[str]


_TYPES: dict[str, type] = {
    name: get_args(hint)[0] if get_origin(hint) is Annotated else hint
    for name, hint in get_type_hints(Settings, include_extras=True).items()
}
_RANGES: dict[str, Meta] = {
    name: get_args(hint)[1]
    for name, hint in get_type_hints(Settings, include_extras=True).items()
    if get_origin(hint) is Annotated
}
_KINDS = {int: "a whole number", bool: "true or false", str: "a text"}
_WORDS = {"true": True, "1": True, "yes": True, "on": True}
_WORDS |= {"false": False, "0": False, "no": False, "off": False}


def load_settings(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> LoadedSettings:
    """Put settings together. A flag that is None was not given.

    Raises InvalidArgument for an unknown name, a wrong type or a value out of range, naming the
    place; NotFound when `file` cannot be read.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(_TYPES, "default")
    ignored: list[str] = []
    if file is not None:
        for name, value in _read_file(Path(file)).items():
            values[name] = _typed(name, value, str(file))
            sources[name] = str(file)
    for variable, text in sorted((environment or {}).items()):
        if variable == "DANUBE_SIGN_ON" and CLIENT_MARK in text:
            continue
        setting = _setting_of(variable)
        if setting is not None:
            values[setting] = parse_setting(setting, text, variable)
            sources[setting] = variable
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable not in ENVIRONMENT_OTHERS:
            ignored.append(variable)
    for name, value in (flags or {}).items():
        if name not in _TYPES:
            raise InvalidArgument(_unknown(name, "a flag"))
        if value is not None:
            sources[name] = f"flag --{name.replace('_', '-')}"
            values[name] = _typed(name, value, sources[name])
    settings = Settings(**values)
    _check_together(settings, sources)
    return LoadedSettings(settings, sources, ignored)


def parse_setting(name: str, text: str, place: str) -> Any:
    """The value of one setting that a text spells. Raises InvalidArgument that names the place."""
    if name not in _TYPES:
        raise InvalidArgument(_unknown(name, place))
    return _typed(name, _parse(name, text, place), place)


def split_address(text: str, what: str) -> tuple[str, int]:
    """HOST:PORT as its two parts; an IPv6 host stands in brackets. `what` names it in the error."""
    host, separator, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    sound = host and port.isascii() and port.isdigit() and (bracketed or ":" not in host)
    if not separator or not sound or int(port) > PORT_MAX:
        raise InvalidArgument(
            f"{what} is {text!r}; write HOST:PORT with a port from 0 to {PORT_MAX}, for example "
            "127.0.0.1:6650"
        )
    return (host[1:-1] if bracketed else host), int(port)


def join_address(host: str, port: int) -> str:
    """Write HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as opened:
            content = tomllib.load(opened)
    except OSError as error:
        raise NotFound(
            f"the configuration file {path} cannot be read ({error.strerror}); check its name"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} is not TOML: {error}; correct it there") from error
    for name in content:
        if name not in _TYPES:
            raise InvalidArgument(_unknown(name, str(path)))
    return content


def _setting_of(variable: str) -> str | None:
    """The setting that an environment variable names; None if it is none of ours."""
    if not variable.startswith(ENVIRONMENT_PREFIX) or variable in ENVIRONMENT_OTHERS:
        return None
    name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
    if name in _TYPES:
        return name
    # Others use our prefix too (an orchestrator sets DANUBE_SERVICE_HOST for a service of that name), so
    # only what looks like a slip of the pen is refused.
    if difflib.get_close_matches(name, _TYPES, 1, RESEMBLANCE_MIN):
        raise InvalidArgument(_unknown(name, f"the environment ({variable})"))
    return None


def _unknown(name: str, place: str) -> str:
    near = difflib.get_close_matches(name, _TYPES, 1, 0.5)
    remedy = f"did you mean {near[0]!r}?" if near else "`danube-fast config show` lists them all"
    return f"there is no setting {name!r} (in {place}); {remedy}"


def _parse(name: str, text: str, place: str) -> Any:
    """The value that an environment variable spells."""
    kind = _TYPES[name]
    if kind is bool:
        value = _WORDS.get(text.strip().lower())
        if value is None:
            raise InvalidArgument(_wrong_type(name, text, place))
        return value
    if kind is int:
        amount = parse_amount(name, text)
        if amount is None:
            raise InvalidArgument(_wrong_type(name, text, place))
        return amount
    return text


def _wrong_type(name: str, value: Any, place: str) -> str:
    unit = unit_of(name) if _TYPES[name] is int else ""
    example = f", or written as {'64MiB' if unit == 'b' else '10s'}" if unit else ""
    kind = _KINDS[_TYPES[name]]
    return f"{name} must be {kind}{example}, and {place} gives {shown_value(name, value)!r}; correct it there"


def _typed(name: str, value: Any, place: str) -> Any:
    """`value`, checked against the type and the range of the field."""
    kind = _TYPES[name]
    if kind is int and isinstance(value, str):  # a size or a duration with its unit
        amount = parse_amount(name, value) if unit_of(name) else None
        value = value if amount is None else amount
    if type(value) is not kind:
        raise InvalidArgument(_wrong_type(name, value, place))
    meta = _RANGES.get(name)
    if meta is not None:
        try:
            msgspec.convert(value, Annotated[kind, meta])
        except msgspec.ValidationError:
            raise InvalidArgument(
                f"{name} must be {_range_text(meta)}, and {place} gives {value!r}; correct it there"
            ) from None
    return value


def _range_text(meta: Meta) -> str:
    if meta.pattern is not None:
        return meta.pattern.strip("^$()").replace("|", " or ")
    if meta.min_length is not None:
        return "a text that is not empty"
    text = f"from {meta.ge}" if meta.le is not None else f"at least {meta.ge}"
    if meta.le is not None:
        text += f" to {meta.le}"
    if meta.multiple_of is not None:
        text += f" and a multiple of {meta.multiple_of}"
    return text


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """Values that are right alone and wrong together."""
    split_address(settings.listen, f"listen ({sources['listen']})")
    if settings.admin:
        split_address(settings.admin, f"admin ({sources['admin']})")
    _check_tls(settings, sources)
    _check_sign_on(settings, sources)
    if settings.session_timeout_ms < 2 * settings.heartbeat_ms:
        raise InvalidArgument(
            f"session_timeout_ms ({settings.session_timeout_ms}, {sources['session_timeout_ms']}) "
            f"must be at least twice heartbeat_ms ({settings.heartbeat_ms}, "
            f"{sources['heartbeat_ms']}), or one late heartbeat ends a session; change one of them"
        )


def _check_tls(settings: Settings, sources: Mapping[str, str]) -> None:
    """Raise InvalidArgument for a certificate without a key and the like."""
    if bool(settings.tls_certificate) != bool(settings.tls_key):
        given, missing = "tls_certificate", "tls_key"
        if settings.tls_key:
            given, missing = missing, given
        raise InvalidArgument(
            f"{given} ({sources[given]}) needs {missing}; set both, or neither for no TLS: `danube-fast security "
            "new-certificate` makes a pair"
        )
    if settings.tls_client_ca and not settings.tls_certificate:
        raise InvalidArgument(
            f"tls_client_ca ({sources['tls_client_ca']}) means nothing without TLS; set tls_certificate and tls_key too"
        )
    if settings.tls_client_crl and not settings.tls_client_ca:
        raise InvalidArgument(
            f"tls_client_crl ({sources['tls_client_crl']}) means nothing while clients show no certificates; set "
            "tls_client_ca too"
        )


def _check_sign_on(settings: Settings, sources: Mapping[str, str]) -> None:
    """Raise InvalidArgument for a sign-on that could not be."""
    for name, needed, remedy in (
        ("tokens", "sign_on", "set sign_on to HOST:PORT too"),
        ("authenticator", "sign_on", "set sign_on to HOST:PORT too"),
        ("authenticator_prefix", "authenticator", "set authenticator to NAME too"),
        ("authenticator_unregistered", "authenticator", "set authenticator to NAME too"),
    ):
        if getattr(settings, name) and not getattr(settings, needed):
            raise InvalidArgument(
                f"{name} ({sources[name]}) means nothing without {needed}; {remedy}"
            )
    if not settings.sign_on:
        return
    split_address(settings.sign_on, f"sign_on ({sources['sign_on']})")
    if settings.auth == "none":
        raise InvalidArgument(
            f"sign_on ({sources['sign_on']}) means nothing while no one is asked who they are; set auth to required"
        )
    if not settings.tls_certificate:
        raise InvalidArgument(
            f"sign_on ({sources['sign_on']}) takes secrets, and only by HTTPS: set tls_certificate and tls_key; "
            "`danube-fast security new-certificate` makes a pair"
        )
