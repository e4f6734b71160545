"""Peers that speak ZeroMQ's wire protocol (ZMTP 3.0, NULL and CURVE) byte by byte, as no library would: strangers that fail
as they are told to. CURVE takes libsodium, which pyzmq's wheels bring along.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from danube_fast.errors import FailedPrecondition

__all__ = ["CurvePeer", "NullPeer", "why_no_sodium"]

TIMEOUT_SECONDS = 5.0
_KEY, _NONCE, _TAG = 32, 24, 16


def _sodium_paths() -> list[Path]:
    return list((Path(zmq.__file__).parents[1] / "pyzmq.libs").glob("libsodium*"))


def why_no_sodium() -> str:
    """Why no peer can speak CURVE here; empty if one can."""
    return "" if _sodium_paths() else "pyzmq brings no libsodium; install it as a wheel"


def _sodium() -> Any:
    """Load the library. Raises FailedPrecondition."""
    if reason := why_no_sodium():
        raise FailedPrecondition(reason)
    return ctypes.CDLL(str(_sodium_paths()[0]))


class NullPeer:
    """A connection without security."""

    mechanism = b"NULL"

    def __init__(self, port: int | str) -> None:
        """`port`: of tcp, or the name of an abstract Unix socket."""
        if isinstance(port, int):
            self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS)
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.settimeout(TIMEOUT_SECONDS)
            self.socket.connect(f"\0{port}")

    def read(self, count: int) -> bytes:
        """That many bytes; raises OSError if they do not come."""
        found = b""
        while len(found) < count:
            piece = self.socket.recv(count - len(found))
            if not piece:
                raise ConnectionResetError("closed by the broker")
            found += piece
        return found

    def read_frame(self) -> bytes:
        """The content of the next frame."""
        flags = self.read(1)[0]
        size = struct.unpack(">Q", self.read(8))[0] if flags & 2 else self.read(1)[0]
        return self.read(size)

    @staticmethod
    def framed(content: bytes, flags: int) -> bytes:
        """A frame."""
        if len(content) < 256:
            return bytes([flags, len(content)]) + content
        return bytes([flags | 2]) + struct.pack(">Q", len(content)) + content

    def greet(self) -> None:
        """Exchange greetings."""
        self.socket.sendall(
            b"\xff" + bytes(8) + b"\x7f\x03\x00" + self.mechanism.ljust(20, b"\0") + bytes(32)
        )
        self.read(64)

    def metadata(self) -> bytes:
        """What a peer says of itself."""
        return b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"

    def shake_hands(self) -> None:
        """Do all of the handshake; raises OSError if it fails."""
        self.greet()
        self.socket.sendall(self.framed(b"\x05READY" + self.metadata(), 4))
        self.read_frame()

    def message(self, content: bytes, *, more: bool) -> bytes:
        """The bytes of one part of a message."""
        return self.framed(content, int(more))

    def hello(self) -> None:
        """Become a session."""
        self.socket.sendall(self.message(msgspec.msgpack.encode([1, 1, 1, "attacker"]), more=False))
        self.read_frame()


class CurvePeer(NullPeer):
    """A connection with a key, registered or not."""

    mechanism = b"CURVE"

    def __init__(self, port: int, server_key: str, public: str, secret: str) -> None:
        super().__init__(port)
        self.sodium = _sodium()
        self.server_key, self.public, self.secret = map(z85.decode, (server_key, public, secret))
        self.short_public, self.short_secret = self.new_keys()
        self.count = 0

    def new_keys(self) -> tuple[bytes, bytes]:
        """A key pair."""
        public, secret = (ctypes.create_string_buffer(_KEY) for _ in range(2))
        self.sodium.crypto_box_keypair(public, secret)
        return public.raw, secret.raw

    def box(self, text: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
        """Seal a text for the owner of `public`."""
        sealed = ctypes.create_string_buffer(len(text) + _TAG)
        size = ctypes.c_ulonglong(len(text))
        self.sodium.crypto_box_easy(sealed, text, size, nonce, public, secret)
        return sealed.raw

    def nonce(self, prefix: bytes) -> tuple[bytes, bytes]:
        """The next short nonce, and the whole one."""
        self.count += 1
        short = struct.pack(">Q", self.count)
        return short, prefix + short

    def say_hello(self) -> bytes:
        """Greet and send HELLO of CURVE; the body of the WELCOME."""
        self.greet()
        short, nonce = self.nonce(b"CurveZMQHELLO---")
        signed = self.box(bytes(64), nonce, self.server_key, self.short_secret)
        self.socket.sendall(
            self.framed(b"\x05HELLO\x01\x00" + bytes(72) + self.short_public + short + signed, 4)
        )
        return self.read_frame()[8:]

    def initiate(self, welcome: bytes) -> None:
        """Prove the key; raises OSError if it is refused."""
        opened = ctypes.create_string_buffer(128)
        sealed = welcome[16:]
        size = ctypes.c_ulonglong(len(sealed))
        nonce = b"WELCOME-" + welcome[:16]
        if self.sodium.crypto_box_open_easy(
            opened, sealed, size, nonce, self.server_key, self.short_secret
        ):
            raise ConnectionResetError("a WELCOME of another server")
        self.other, cookie = opened.raw[:32], opened.raw[32:]
        drawn = secrets.token_bytes(16)
        vouch = self.box(
            self.short_public + self.server_key, b"VOUCH---" + drawn, self.other, self.secret
        )
        short, nonce = self.nonce(b"CurveZMQINITIATE")
        text = self.public + drawn + vouch + self.metadata()
        sealed = self.box(text, nonce, self.other, self.short_secret)
        self.socket.sendall(self.framed(b"\x08INITIATE" + cookie + short + sealed, 4))
        answer = self.read_frame()
        if not answer.startswith(b"\x05READY"):
            raise ConnectionRefusedError(str(answer[:16]))
        shared = ctypes.create_string_buffer(_KEY)
        self.sodium.crypto_box_beforenm(shared, self.other, self.short_secret)
        self.shared = shared.raw

    def shake_hands(self) -> None:
        """Do all of the handshake; raises OSError if it fails."""
        self.initiate(self.say_hello())

    def message(self, content: bytes, *, more: bool) -> bytes:
        """The bytes of one part of a message."""
        short, nonce = self.nonce(b"CurveZMQMESSAGEC")
        text = bytes([more]) + content
        sealed = ctypes.create_string_buffer(len(text) + _TAG)
        size = ctypes.c_ulonglong(len(text))
        self.sodium.crypto_box_easy_afternm(sealed, text, size, nonce, self.shared)
        return self.framed(b"\x07MESSAGE" + short + sealed.raw, 0)
