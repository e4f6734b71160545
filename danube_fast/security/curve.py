"""CURVE keys: who holds the secret one is who the public one names.

    # a comment that says what the file is
    public = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    secret = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"

A key file belongs to its owner alone. It is written once, whole: first beside its place, then linked to its name, which
no other file may have. Keys are Z85 texts of 32 bytes.
"""

from __future__ import annotations

import os
import secrets
import stat
import string
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from danube_fast.descriptors import open_file
from danube_fast.durable import sync_directory
from danube_fast.errors import AlreadyExists, FailedPrecondition, InvalidArgument

__all__ = [
    "KeyPair",
    "is_public_key",
    "load_or_make",
    "new_key_pair",
    "read_key_file",
    "write_key_file",
]

_DIGITS = (
    string.digits + string.ascii_lowercase + string.ascii_uppercase + ".-:+=^!/*?&<>()[]{}@%$#"
)
"""Of Z85, in the order of their values."""
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_KEY_CHARACTERS = 40
_GROUP_CHARACTERS = 5
"""Of a word of 32 bits."""
_WORDS_END = 1 << 32
_OWNER_ONLY = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FILE_BYTES_MAX = 4096
_HEAD = "# CURVE key pair of danube-fast. The secret key proves the identity: keep this file to its owner.\n"
_REMEDY = "restore the file, or make a new pair and register its public key"


@dataclass(frozen=True)
class KeyPair:
    """A public key and the secret one that it belongs to, Z85 texts."""

    public: str
    secret: str = field(repr=False)


def is_public_key(text: str) -> bool:
    """Whether a text can be a public key: 32 bytes in Z85, not all zero."""
    if len(text) != _KEY_CHARACTERS or not all(digit in _VALUES for digit in text):
        return False
    groups = [text[at : at + _GROUP_CHARACTERS] for at in range(0, len(text), _GROUP_CHARACTERS)]
    words = [_word_of(group) for group in groups]
    return max(words) < _WORDS_END and any(words)


def _word_of(group: str) -> int:
    """Read the number that some digits of Z85 stand for."""
    word = 0
    for digit in group:
        word = word * len(_DIGITS) + _VALUES[digit]
    return word


def new_key_pair() -> KeyPair:
    """Draw a key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def write_key_file(path: Path, pair: KeyPair) -> None:
    """Write a key pair durably to a new file that its owner alone may read.

    Raises AlreadyExists, FailedPrecondition.
    """
    text = f'{_HEAD}public = "{pair.public}"\nsecret = "{pair.secret}"\n'
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_new(beside, text.encode())
        try:
            os.link(beside, path)
        finally:
            beside.unlink()
        sync_directory(path.parent)
    except FileExistsError:
        raise AlreadyExists(
            f"{path} exists, and a key file is never overwritten: choose another name, or move it away"
        ) from None
    except OSError as error:
        raise FailedPrecondition(
            f"cannot write the key file {path}: {error}; make its folder writable for this user"
        ) from error


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that does not exist yet, for its owner alone, and sync it. Raises OSError; then it is gone again."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(
        path, "wb", buffering=0, opener=lambda name, _: open_file(name, flags, _OWNER_ONLY)
    ) as file:
        try:
            os.fchmod(file.fileno(), _OWNER_ONLY)  # whatever a default ACL or the umask say
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def read_key_file(path: Path) -> KeyPair:
    """Read a key pair.

    Raises FailedPrecondition if the file is missing or not its owner's alone, InvalidArgument if it holds no key pair.
    No text of the file is in the error.
    """
    text = _read_private(path)
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        found = {}
    public, secret = found.get("public"), found.get("secret")
    if len(found) != 2 or not isinstance(public, str) or not isinstance(secret, str):
        raise InvalidArgument(f"{path} is no key file of danube-fast; {_REMEDY}")
    if not is_public_key(public) or not is_public_key(secret):  # both are 32 bytes
        raise InvalidArgument(f"a key in {path} is not 40 characters of Z85; {_REMEDY}")
    if zmq.curve_public(secret.encode()).decode() != public:
        raise InvalidArgument(
            f"the public key in {path} does not belong to the secret one; {_REMEDY}"
        )
    return KeyPair(public, secret)


def _read_private(path: Path) -> str:
    """Read a small text file that other users can neither read nor have written. Raises FailedPrecondition,
    InvalidArgument."""
    try:
        # without O_NONBLOCK the open of a FIFO waits for its writer
        fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise FailedPrecondition(f"there is no key file {path}; {_REMEDY}") from None
    except OSError as error:
        raise FailedPrecondition(
            f"cannot read the key file {path}: {error}; its owner must run this"
        ) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"{path} is not a file; name a key file")
        if found.st_uid not in (os.geteuid(), 0):
            raise FailedPrecondition(
                f"the key file {path} belongs to user {found.st_uid}, who can change it: chown it to the user of this "
                "process"
            )
        if found.st_mode & _OTHERS:
            raise FailedPrecondition(
                f"other users may read or write the key file {path} (mode "
                f"{stat.S_IMODE(found.st_mode):04o}): run `chmod 600 {path}`, and make a new pair if they may have read "
                "it"
            )
        content = os.read(fd, _FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError:
        text = ""
    if len(content) > _FILE_BYTES_MAX or not text:
        raise InvalidArgument(f"{path} is no key file of danube-fast; {_REMEDY}")
    return text


def load_or_make(path: Path) -> KeyPair:
    """Read the key pair of a file; where there is none, make one and write it there. Raises as `read_key_file` and
    `write_key_file`."""
    if not os.path.lexists(path):
        pair = new_key_pair()
        try:
            write_key_file(path, pair)
        except AlreadyExists:  # another process was faster
            return read_key_file(path)
        return pair
    return read_key_file(path)
