"""CURVE keys: who holds the secret one is who the public one names.

    # a comment that says what the file is
    public = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    secret = "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"

A key file belongs to its owner alone. It is written once, whole: first beside its place, then linked to its name, which
no other file may have. Keys are Z85 texts of 32 bytes.
"""

from __future__ import annotations

import os
import string
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from danube_fast.errors import AlreadyExists, InvalidArgument
from danube_fast.security.private_files import PrivateFile, make_file, read_private

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
_HEAD = "# CURVE key pair of danube-fast. The secret key proves the identity: keep this file to its owner.\n"
_REMEDY = "restore the file, or make a new pair and register its public key"
_LOST_REMEDY = "make a new pair"


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

    Raises AlreadyExists, FailedPrecondition, InvalidArgument.
    """
    text = f'{_HEAD}public = "{pair.public}"\nsecret = "{pair.secret}"\n'
    make_file(path, text.encode(), "key file")


def read_key_file(path: Path) -> KeyPair:
    """Read a key pair.

    Raises FailedPrecondition if the file is missing or not its owner's alone, InvalidArgument if it holds no key pair.
    No text of the file is in the error.
    """
    text, remedy = _read_text(path), _remedy_of(path)
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        found = {}
    public, secret = found.get("public"), found.get("secret")
    if len(found) != 2 or not isinstance(public, str) or not isinstance(secret, str):
        raise InvalidArgument(f"{path} is no key file of danube-fast; {remedy}")
    if not is_public_key(public) or not is_public_key(secret):  # both are 32 bytes
        raise InvalidArgument(f"a key in {path} is not 40 characters of Z85; {remedy}")
    if zmq.curve_public(secret.encode()).decode() != public:
        raise InvalidArgument(
            f"the public key in {path} does not belong to the secret one; {remedy}"
        )
    return KeyPair(public, secret)


def _remedy_of(path: Path) -> str:
    """Say what to do about a key file that is missing or damaged: those of a broker have ways of their own."""
    recover = f"danube-fast security recover --data-dir {path.parent}"
    if path.name.startswith("server.key"):
        return f"put it back from a backup, or stop the broker and run: {recover} --new-server-key --yes"
    if path.name == "bootstrap-admin.key":
        return (
            "it is good for one connection and then gone, so use the key of the administrator that you have made; if "
            "there is none, restart the broker, which makes a new one; if that key is lost, stop the broker and run: "
            f"{recover}"
        )
    return _REMEDY


def _read_text(path: Path) -> str:
    """Read the text of a key file. Raises FailedPrecondition, InvalidArgument."""
    remedy = _remedy_of(path)
    content = read_private(path, PrivateFile(remedy=remedy, lost_remedy=_LOST_REMEDY))
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is no key file of danube-fast; {remedy}") from None


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
