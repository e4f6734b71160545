"""Key pairs of a broker in its data directory, and the steps of their rotation.

    one key    server.key
    prepared   server.key   server.key.next        clients are given both public keys
    activated  server.key   server.key.previous    the pair that was next is in use

    one key --prepare--> prepared --activate--> activated --retire--> one key
            <--revert---          <--revert----

`server.key` is always the one in use, and is only ever replaced whole, by a rename: a crash between two steps leaves a
broker that starts with the old key or with the new one. `server.pub` has the public keys for other programs, and tells
a start that a `server.key` which is missing was there before.
"""

from __future__ import annotations

import enum
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from danube_fast.durable import replace_file, sync_directory
from danube_fast.errors import FailedPrecondition, Unavailable
from danube_fast.security.curve import (
    KeyPair,
    is_public_key,
    load_or_make,
    new_key_pair,
    read_key_file,
    write_key_file,
)

__all__ = [
    "NEXT_KEY",
    "PREVIOUS_KEY",
    "PUBLIC_KEYS",
    "SERVER_KEY",
    "Rotation",
    "ServerKeys",
    "Stage",
    "is_secured",
    "secured_by",
    "server_keys",
]

SERVER_KEY = "server.key"
"""File with the CURVE key pair that a secured broker uses."""
NEXT_KEY = "server.key.next"
"""File with the pair that is to come."""
PREVIOUS_KEY = "server.key.previous"
"""File with the pair that was in use before."""
PUBLIC_KEYS = "server.pub"
"""File with the public keys that clients pin, the newest first, a line each."""
_READS_MAX = 5
_PUBLIC_HEAD = (
    "# Public keys of this broker, the newest first: what its clients pin. They are no secret.\n"
)


class Stage(enum.StrEnum):
    """How far a rotation is."""

    ONE_KEY = "one_key"
    PREPARED = "prepared"
    ACTIVATED = "activated"


@dataclass(frozen=True)
class Rotation:
    """Public keys of a broker, and how far their rotation is."""

    stage: Stage
    active: str
    """The key in use."""
    other: str = ""
    """The one to come, or the one before; empty: there is none."""

    @property
    def keys(self) -> list[str]:
        """Keys that clients should pin, the newest first."""
        if self.stage is Stage.PREPARED:
            return [self.other, self.active]
        return [self.active, *([self.other] if self.other else [])]


def server_keys(data_dir: Path) -> list[str]:
    """Return the public keys that clients of the broker should pin, the newest first.

    Raises FailedPrecondition if a key file is missing or readable by others, InvalidArgument if it is damaged.
    """
    return ServerKeys(data_dir).rotation().keys


def is_secured(data_dir: Path) -> bool:
    """Whether a data directory has a server key, or had one: its broker asks clients who they are."""
    return bool(secured_by(data_dir))


def secured_by(data_dir: Path) -> list[str]:
    """List the files that say so."""
    names = SERVER_KEY, PUBLIC_KEYS, NEXT_KEY, PREVIOUS_KEY
    return [name for name in names if os.path.lexists(data_dir / name)]


class ServerKeys:
    """Read and rotate the key pairs in a data directory. One process at a time changes them: the coordinator, or a
    command that holds the directory's lock."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir
        self._active = data_dir / SERVER_KEY
        self._next, self._previous = data_dir / NEXT_KEY, data_dir / PREVIOUS_KEY

    def open(self) -> Rotation:
        """Read the keys at the start of a broker; a new data directory gets its first pair.

        Raises FailedPrecondition if the key was there before and is gone, InvalidArgument if it is damaged.
        """
        if not os.path.lexists(self._active) and is_secured(self._folder):
            raise FailedPrecondition(
                f"{self._active} is gone, and clients know this broker by its key: put the file back from a backup, or "
                f"make a new key with: danube-fast security recover --data-dir {self._folder} --new-server-key --yes"
            )
        load_or_make(self._active)
        self.check_known()
        for path in self._folder.glob(f".{SERVER_KEY}*.*"):
            self._remove(path)  # a key file that a crash has left half made
        self._clear()
        return self._told()

    def check_known(self) -> None:
        """Raise FailedPrecondition if no pair is one of those that were shown to clients: the file was replaced. The last step of
        a rotation may not have been written there."""
        path = self._folder / PUBLIC_KEYS
        try:
            shown = path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            return  # it is written anew
        known = [line for line in shown if is_public_key(line)]
        if known and not set(self.rotation().keys) & set(known):
            raise FailedPrecondition(
                f"{self._active} is not the key that clients know, which {path} shows: if it is the broker's own, rotated "
                f"since, or clients are to pin it now, remove {path} and start again; else put the other one back from a backup"
            )

    def active(self) -> KeyPair:
        """Read the pair in use. Raises FailedPrecondition, InvalidArgument."""
        return read_key_file(self._active)

    def rotation(self) -> Rotation:
        """Read how far the rotation is. Any process may, while another one changes it. Raises FailedPrecondition,
        InvalidArgument, Unavailable."""
        fault: FailedPrecondition | None = None
        for _ in range(_READS_MAX):
            active = self.active().public
            try:
                found = self._look(active)
            except FailedPrecondition as error:  # perhaps a file went between two looks at it
                fault = error
                continue
            if self.active().public == active:
                return found
        raise fault or Unavailable("the server keys change just now; try again")

    def _look(self, active: str) -> Rotation:
        for path, stage in ((self._next, Stage.PREPARED), (self._previous, Stage.ACTIVATED)):
            if os.path.lexists(path):
                other = read_key_file(path).public
                if other != active:  # the rest of a step that a crash has cut off
                    return Rotation(stage, active, other)
        return Rotation(Stage.ONE_KEY, active)

    # ---------------------------------------------------------------- steps

    def prepare(self) -> Rotation:
        """Make the pair that is to come; if there is one, nothing. Raises FailedPrecondition."""
        rotation = self._read()
        if rotation.stage is Stage.ACTIVATED:
            raise FailedPrecondition(
                f"the key before this one, {rotation.other}, is not retired: do so first with: danube-fast security "
                "server-key retire"
            )
        if rotation.stage is Stage.ONE_KEY:
            write_key_file(self._next, new_key_pair())
        return self._told()

    def activate(self) -> Rotation:
        """Put the pair that is to come in the place of the one in use; if that was done already, nothing. Raises
        FailedPrecondition."""
        rotation = self._read()
        if rotation.stage is Stage.ONE_KEY:
            raise FailedPrecondition(
                "there is no key to activate: make it with: danube-fast security server-key prepare, and give it to "
                "clients beside the one in use"
            )
        if rotation.stage is Stage.PREPARED:
            self._swap(self._next, self._previous)
        return self._told()

    def revert(self) -> Rotation:
        """Undo the last step: use the key before again, or give up the one that is to come. Raises FailedPrecondition."""
        rotation = self._read()
        if rotation.stage is Stage.ONE_KEY:
            raise FailedPrecondition("there is one key: no step of a rotation is to be undone")
        if rotation.stage is Stage.PREPARED:
            self._remove(self._next)
        else:
            self._swap(self._previous, self._next)
        return self._told()

    def retire(self) -> Rotation:
        """Remove the pair that was in use before. Raises FailedPrecondition."""
        rotation = self._read()
        if rotation.stage is Stage.ONE_KEY:
            raise FailedPrecondition("there is one key: none is to be retired")
        if rotation.stage is Stage.PREPARED:
            raise FailedPrecondition(
                f"the key {rotation.other} was prepared and is not in use: activate it first, or give it up with: "
                "danube-fast security server-key revert"
            )
        self._remove(self._previous)
        return self._told()

    def replace(self) -> Rotation:
        """Begin with a new pair, whatever was there: all keys before are gone. For a broker that is not running."""
        beside = self._folder / f".{SERVER_KEY}.{secrets.token_hex(8)}"
        write_key_file(beside, new_key_pair())
        # the others first: a crash must not leave a pair that is to come beside the new one
        self._remove(self._next)
        self._remove(self._previous)
        self._remove(self._folder / PUBLIC_KEYS)
        os.replace(beside, self._active)
        sync_directory(self._folder)
        return self._told()

    def _read(self) -> Rotation:
        """Read how far the rotation is, and finish a step that a crash has cut off."""
        self._clear()
        return self._look(self.active().public)

    def _clear(self) -> None:
        """Remove the pair beside the one in use if it is the same, as a crash in `_swap` leaves it."""
        active = self.active().public
        for path in (self._next, self._previous):
            if os.path.lexists(path) and read_key_file(path).public == active:
                self._remove(path)

    def _swap(self, taken: Path, kept: Path) -> None:
        """Put the pair of `taken` in the place of the one in use, which is kept. A crash leaves one or the other."""
        self._remove(kept)
        try:
            os.link(self._active, kept)
            sync_directory(self._folder)
            os.replace(taken, self._active)
            sync_directory(self._folder)
        except OSError as error:
            raise FailedPrecondition(
                f"cannot change the server key in {self._folder}: {error}; see to its disk and its permissions"
            ) from error

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
            sync_directory(self._folder)
        except OSError as error:
            raise FailedPrecondition(
                f"cannot remove {path}: {error}; see to the permissions of its folder"
            ) from error

    def _told(self) -> Rotation:
        """Read how far the rotation is, and write the public keys down."""
        rotation = self._look(self.active().public)
        text = _PUBLIC_HEAD + "".join(f"{key}\n" for key in rotation.keys)
        path = self._folder / PUBLIC_KEYS
        try:
            if not path.exists() or path.read_text() != text:
                replace_file(path, text.encode())
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPrecondition(
                f"cannot write {path}: {error}; see to the permissions of its folder"
            ) from error
        return rotation
