"""How a command opens a client: with the values that the environment or the context in use gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danube_fast.cli.contexts.context_file import Value

__all__ = ["open_client"]

CLIENT_NAME = "danube-fast"
_TOKEN_BYTES_MAX = 1 << 16


def open_client(url: str, found: Mapping[str, Value], seconds: float, **options: Any) -> Any:
    """Return a client that comes in by these values."""
    # Imported here: it loads the kernels, and `--help` must not wait for them.
    import danube_fast

    options |= {
        name: found[name].text for name in ("server_key", "key_file", "sign_on", "tls") if found[name].text
    }  # fmt: skip
    if path := found["token_file"].text:
        # read for each sign-on: what renews a token writes it there
        options["token"] = lambda: _read_token(Path(path))
    return danube_fast.connect(url, name=CLIENT_NAME, timeout=seconds, **options)


def _read_token(path: Path) -> str:
    """Read an API key or a token. Raises FailedPrecondition, InvalidArgument, which never quote it."""
    from danube_fast.security.private_files import PrivateFile, read_private

    remedy = "name a file with an API key or a token"
    content = read_private(path, PrivateFile("token file", remedy, bytes_max=_TOKEN_BYTES_MAX))
    return content.decode(errors="replace").strip()
