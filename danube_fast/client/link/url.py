"""`danube://host:port,host:port` -> endpoints of bootstrap connections."""

from __future__ import annotations

from danube_fast.errors import InvalidArgument

__all__ = ["DEFAULT_PORT", "DEFAULT_URL", "parse_url"]

DEFAULT_PORT = 6650
DEFAULT_URL = f"danube://127.0.0.1:{DEFAULT_PORT}"
_SCHEME = "danube://"
_PORT_MAX = 65_535
_HOSTS_MAX = 32


def parse_url(url: str) -> list[str]:
    """ZeroMQ endpoints of every host in the url, in order. Raises InvalidArgument."""
    if not isinstance(url, str) or not url.startswith(_SCHEME):
        raise InvalidArgument(f"{url!r} is not a broker address; write danube://host:port")
    if "?" in url or "#" in url:  # not repeated: there may be a key in it
        raise InvalidArgument(
            "a broker's address has no options; write danube://host:port, and pass options such as "
            "server_key=, key_file= and token= beside it"
        )
    if "@" in url:  # not repeated: there may be a password in it
        raise InvalidArgument("a broker's address names no user; write danube://host:port")
    hosts = url[len(_SCHEME) :].rstrip("/").split(",")
    if len(hosts) > _HOSTS_MAX:
        raise InvalidArgument(f"{len(hosts)} hosts in one address; name at most {_HOSTS_MAX}")
    return [_endpoint(host.strip(), url) for host in hosts]


def _endpoint(host: str, url: str) -> str:
    name, separator, port = host.rpartition(":")
    if not separator or name.endswith(":") or host.endswith("]"):
        name, port = host, str(DEFAULT_PORT)
    well_formed = name and "/" not in name and (":" not in name or name.startswith("["))
    if not well_formed or not port.isdecimal() or not 0 < int(port) <= _PORT_MAX:
        raise InvalidArgument(
            f"{host!r} in {url!r} is not host:port; write danube://127.0.0.1:6650 or danube://[::1]:6650"
        )
    return f"tcp://{name}:{port}"
