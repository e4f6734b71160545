"""The key file of a client: its CURVE key pair, two lines of TOML that its owner alone may read.

# whose key this is
public = "..."
secret = "..."
"""

from __future__ import annotations

import os
import stat
import tomllib
from pathlib import Path

import zmq
from zmq.utils import z85

from danube_fast.errors import FailedPrecondition, InvalidArgument

__all__ = ["is_key", "read_keys"]

_KEY_CHARACTERS = 40
_FILE_BYTES_MAX = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_key(text: object) -> bool:
    """Whether that is 32 bytes in Z85."""
    if not isinstance(text, str) or len(text) != _KEY_CHARACTERS:
        return False
    try:
        z85.decode(text)
    except (
        Exception
    ):  # a digit that Z85 does not have, or five that are no 32 bits: each raises its own
        return False
    return True


def read_keys(path: Path) -> tuple[str, str]:
    """Read the public and the secret key of a key file.

    Raises FailedPrecondition if the file is missing or not its owner's alone, InvalidArgument if it holds no key
    pair. No text of the file is in the error.
    """
    try:
        found = tomllib.loads(_read_private(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        found = {}
    public, secret = found.get("public"), found.get("secret")
    if len(found) != 2 or not isinstance(public, str) or not isinstance(secret, str):
        raise InvalidArgument(
            f'{path} is no key file: write two lines, public = "..." and secret = "..."'
        )
    if not is_key(public) or not is_key(secret):
        raise InvalidArgument(f"a key in {path} is not 40 characters of Z85; restore the file")
    if zmq.curve_public(secret.encode()).decode() != public:
        raise InvalidArgument(
            f"the public key in {path} does not belong to the secret one; restore the file"
        )
    return public, secret


def _read_private(path: Path) -> str:
    """Read a small file that other users can neither read nor write."""
    try:
        # a FIFO must not keep the caller waiting
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FailedPrecondition(
            f"cannot read the key file {path} ({error.strerror}); check key_file="
        ) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FailedPrecondition(f"{path} is no regular file; check key_file=")
        if status.st_mode & _OTHERS:
            raise FailedPrecondition(
                f"other users may use the key file {path}; run `chmod 600 {path}`, and make a new "
                "pair if they may have read it"
            )
        content = os.read(fd, _FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(content) > _FILE_BYTES_MAX:
        raise InvalidArgument(f"{path} is too large for a key file; check key_file=")
    return content.decode()
