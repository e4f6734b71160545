"""Doorbell: wake a process through its eventfd, but only when it is asleep.

A sleep costs some 20 us each way, a signal to someone awake is a system call for nothing. So the
consumer says in a shared word that it sleeps, and a producer looks there:

    consumer                                      producer
    prepare_sleep():                              ring.try_push(...)          store_release(tail)
      store sleeping word = n   (seq_cst)         ring():
      fence                                         fence
    look into all rings         load(tail)          load sleeping word
      something there: cancel_sleep()               not 0: write the eventfd,
      nothing: poll(fileno(), ...)                         then word: n -> 0
    cancel_sleep(), drain()

The two fences pair: of "consumer loads tail" and "producer loads sleeping word" at least one comes
after the other side's store. So either the consumer finds the record, or the producer finds it
asleep. Release and acquire alone do not give that.

n is a number of its own for every sleep. The producer writes the eventfd first and clears the word
second, with compare_exchange from the n that it saw: if it dies in between, the next producer
signals again; if it is slow and the consumer sleeps anew meanwhile, the exchange fails and that
sleep keeps its word. No order of deaths loses a wake-up, and one sleep costs one signal (two when
two producers ring in the same instant).

Still, poll with a timeout: a producer that dies between tail and ring() does not ring.
"""

from __future__ import annotations

import os

from danube_fast.frame.kernel import direct, kernel
from danube_fast.ring.atomics import (
    compare_exchange,
    fence,
    load_relaxed,
    store_relaxed,
    store_release,
    store_seq_cst,
)
from danube_fast.ring.layout import AT_SLEEP_COUNT, AT_SLEEPING
from danube_fast.ring.memory import signal_eventfd

__all__ = ["Doorbell"]

_COUNT_FROM_WORD = AT_SLEEP_COUNT - AT_SLEEPING


@kernel("int64(int64)")
def _prepare_sleep(word: int) -> int:
    """Number this sleep and say that it begins. Its fence pairs with the one in _sleep_to_end."""
    number = load_relaxed(word + _COUNT_FROM_WORD) + 1
    store_relaxed(word + _COUNT_FROM_WORD, number)
    store_seq_cst(word, number)
    fence()
    return number


@kernel("int64(int64)")
def _cancel_sleep(word: int) -> int:
    """Say that the sleep is over. Nothing depends on when this is seen."""
    store_release(word, 0)
    return 0


@kernel("int64(int64)")
def _sleep_to_end(word: int) -> int:
    """Number of the sleep to end, 0 = awake. Its fence pairs with the one in _prepare_sleep."""
    fence()
    return load_relaxed(word)


@kernel("int64(int64,int64)")
def _clear(word: int, number: int) -> int:
    """Say that sleep `number` was signalled, unless another one has begun."""
    return compare_exchange(word, number, 0)


_prepare = direct(_prepare_sleep)
_cancel = direct(_cancel_sleep)
_look = direct(_sleep_to_end)
_forget = direct(_clear)


class Doorbell:
    """One process's bell: it sleeps on it, its peers ring it.

    `eventfd` comes from `create_eventfd` and is inherited with `pass_fds`; `word_address` from
    `ControlBlock.doorbell_address`. Owns neither: keep both open as long as this is used.
    """

    __slots__ = ("_eventfd", "_word")

    def __init__(self, eventfd: int, word_address: int) -> None:
        """A bell over a descriptor and a word that exist."""
        self._eventfd = eventfd
        self._word = word_address

    def ring(self) -> bool:
        """Wake the owner if it sleeps; True if a signal was sent. Call after every publish."""
        number = _look(self._word)
        if number == 0:
            return False
        self.ring_always()
        _forget(self._word, number)
        return True

    def ring_always(self) -> None:
        """Wake the owner whatever it says of itself."""
        signal_eventfd(self._eventfd)

    def prepare_sleep(self) -> None:
        """For the owner: I am about to sleep. Look into all rings after this, before polling."""
        _prepare(self._word)

    def cancel_sleep(self) -> None:
        """For the owner: I am awake."""
        _cancel(self._word)

    def drain(self) -> bool:
        """For the owner: forget signals that came; True if there were any. Call when awake."""
        try:
            os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return False
        return True

    def fileno(self) -> int:
        """The eventfd, to poll for reading."""
        return self._eventfd
