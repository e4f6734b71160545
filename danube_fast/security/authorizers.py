"""Authorizers of other packages: rules beside roles, such as those of OPA or Cedar.

An entry point of the group `danube_fast.authorizers` gives a callable; it takes the text behind the colon of the setting
`authorizer` (`NAME` or `NAME:TEXT`) and returns `Rules`. Roles and bindings are asked first: another package can
only take rights away, so that a fault of its rules gives none. One that cannot answer denies.

    roles and bindings --permit--> answer of some seconds ago? --yes--> permitted, or denied
                                     '--no--> Undecided; a thread asks the authorizer --> the loop: what waits begins again

It is asked in threads of the coordinator and of the workers, when handles open and when rights have changed, never for a
message. For a list it is asked one question, within which scopes names are shown: questions about each name would tell by
their time how many names are hidden. If its rules change while the broker runs, its attribute `version`, a number,
changes: then all that is open is looked at again. That is read in a thread, too.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from functools import partial
from inspect import getattr_static
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, cast

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import DanubeError, FailedPrecondition, PermissionDenied, Unavailable
from danube_fast.security.authorization import Permission
from danube_fast.security.entry_points import EntryPointGroup, FaultLog, said
from danube_fast.security.lookup_scopes import LookupScopes
from danube_fast.security.question_threads import (
    ANSWER_SECONDS,
    REPLACED_MAX,
    THREADS_MAX,
    THREADS_OF_ONE_MAX,
    Outcome,
    QuestionThreads,
    Spare,
)
from danube_fast.types import CLUSTER
from danube_fast.undecided import Undecided

__all__ = ["AskedAuthorizer", "Rules", "check_authorizer", "load_authorizer"]

_log = logging.getLogger(__name__)

_GROUP = EntryPointGroup(
    "danube_fast.authorizers",
    "authorizer",
    {"authorize": "principal, permission, resource", "lookup_scopes": "principal"},
)
LOST_OF_ONE_MAX = 2
"""About a principal that has lost so many threads nothing more is asked; it begins with so many."""
RESERVED = 8
"""Threads for what administrators and operators ask about the broker itself."""
REPLACE_NS = SECOND_NS // 20
"""How often those are looked for."""
QUESTIONS_MAX = 4096
QUESTIONS_OF_ONE_MAX = 1024
"""Of one principal, those that wait for a thread too; fewer if there is not so much room left for others."""
WAITING_MAX = 4096
"""What waits for one answer."""
QUESTION_NS = 30 * SECOND_NS
"""How long a question stands, however often the rules change meanwhile."""
ANSWERS_MAX = 16_384
ANSWER_NS = 5 * SECOND_NS
"""How long an answer counts: a command needs several, and passes over what is open follow each other."""
FAULT_NS = SECOND_NS
"""How long no answer counts as one."""
SCOPES_NS = 60 * SECOND_NS
"""How long lists go by scopes: clients that watch ask every few seconds."""
SCOPES_KEPT_MAX = 131_072
"""Of all principals together."""
VERSION_NS = SECOND_NS
"""How often the version of its rules is read."""
VERSIONS_LATE_MAX = 3
"""Reads of it that hang, and have threads."""


_OF_ADMINISTRATORS = Permission.MANAGE_CLUSTER, Permission.MANAGE_BROKER


class Rules(Protocol):
    """An authorizer of another package. Threads call it, several at once."""

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return if `principal` may do that on `resource`. Raises PermissionDenied otherwise."""
        ...

    def lookup_scopes(self, principal: str) -> Iterable[str]:
        """Return the scopes (`security/scopes.py`) within which lists show names to `principal`, such as ["namespace:shop"];
        ["cluster"] for all that roles show, none for nothing, as does PermissionDenied."""
        ...


class _Key(NamedTuple):
    principal: str
    permission: Permission
    resource: str | None
    """None: within which scopes there is the permission."""

    @property
    def question(self) -> str:
        """The question in words, for errors."""
        if self.resource is None:
            return f"which names lists may show to {self.principal}"
        return f"whether {self.principal} may {self.permission} {self.resource}"

    @property
    def is_of_administrator(self) -> bool:
        """Whether roles let the principal manage the cluster, or the broker, and that is the question."""
        return self.permission in _OF_ADMINISTRATORS and self.resource == CLUSTER

    @property
    def asker(self) -> Hashable:
        """Owner of its threads. Nothing that is urgent is held up by what else an administrator wants to know, and nothing
        that shall be opened by lists."""
        return self if self.is_of_administrator or self.resource is None else self.principal


class _Answer(NamedTuple):
    found: Any
    error: DanubeError | None
    until_ns: int

    @property
    def weight(self) -> int:
        """Scopes that it has, and one for itself."""
        return self.found.count + 1 if isinstance(self.found, LookupScopes) else 1


class _Question:
    """A question that is under way."""

    __slots__ = ("answer", "deadline_ns", "is_first", "made_ns", "waiting")

    def __init__(self, now_ns: int, is_first: bool) -> None:
        self.made_ns, self.is_first = now_ns, is_first
        self.extend(now_ns)
        self.answer: Future[Outcome] | None = None
        self.waiting: list[Callable[[], None]] | None = []
        """What begins again when there is an answer; None: there was one."""

    def extend(self, now_ns: int) -> None:
        """Give it the time of a new one, up to an end. Of two questions the older one never ends later."""
        self.deadline_ns = min(now_ns + int(ANSWER_SECONDS * SECOND_NS), self.made_ns + QUESTION_NS)


class AskedAuthorizer:
    """Ask the authorizer of another package, and remember its answers for a moment; its faults deny. Any thread may ask;
    the loop of the process does the rest."""

    def __init__(self, name: str, inner: Rules, clock: Clock) -> None:
        self._name, self._inner, self._clock = name, inner, clock
        self._faults = FaultLog(_log, clock)
        self._version_faults = FaultLog(_log, clock)
        spare = Spare(clock, RESERVED, REPLACED_MAX, LOST_OF_ONE_MAX)
        self._threads = QuestionThreads("authorizer", THREADS_MAX, THREADS_OF_ONE_MAX, spare)
        self._replaced_ns = 0
        self._lock = threading.RLock()
        """Over the tables."""
        self._answers: dict[_Key, _Answer] = {}
        self._scopes: dict[_Key, _Answer] = {}
        """Answers that are scopes, and how many those are."""
        self._scopes_kept = 0
        self._questions: dict[_Key, _Question] = {}
        """In the order of their deadlines."""
        self._of_one: Counter[str] = Counter()
        self.in_loop: Callable[[Callable[[], None]], None] = lambda work: work()
        """Lets the loop do something soon."""
        self.version = 0
        """Number of its rules, as it was read last; 0 if it has none, or tells none."""
        self._has_version = getattr_static(inner, "version", None) is not None
        self._version_threads = QuestionThreads("authorizer", 1 + VERSIONS_LATE_MAX)
        self._version: Future[Outcome] | None = None
        """The newest read that is under way."""
        self._version_until_ns = 0
        self._versions_late = 0
        """Older reads that are under way still."""
        self._version_ns = 0

    def authorize(
        self, principal: str, permission: Permission, resource: str, *, is_first: bool = False
    ) -> None:
        """Return if it permits that. Raises PermissionDenied, Unavailable; Undecided while it is asked. `is_first`: before
        what others want to know of the principal, however much that is."""
        self._answer_to(_Key(str(principal), permission, resource), is_first)

    def lookup_scopes(self, principal: str) -> LookupScopes:
        """Return the scopes within which lists show names. Raises Unavailable; Undecided while it is asked."""
        return cast("LookupScopes", self._answer_to(_Key(str(principal), Permission.LOOKUP, None)))

    def _answer_to(self, key: _Key, is_first: bool = False) -> object:
        """Return what was answered, or raise that; Undecided while it is asked."""
        with self._lock:
            known = self._answers_like(key).get(key)
            if known is not None and self._clock.monotonic_ns() < known.until_ns:
                if known.error is not None:
                    raise type(known.error)(*known.error.args)
                return known.found
            question = self._questions.get(key)
            if question is None:
                question = self._ask(key, is_first)
            elif is_first and not question.is_first:
                self._bring_forward(key, question)
            if not is_first and question.waiting and len(question.waiting) >= WAITING_MAX:
                raise self._too_many()
        raise Undecided(
            f"the authorizer {self._name} is being asked {key.question}; try again",
            partial(self._wait, question),
        )

    def do_work(self, now_ns: int) -> None:
        """Give up questions whose time is over, forget old answers, replace threads that are lost, and read the version when
        it is time."""
        with self._lock:
            for answers in (self._answers, self._scopes):
                while answers and next(iter(answers.values())).until_ns <= now_ns:
                    self._forget(next(iter(answers)))
            old = takewhile(lambda each: each[1].deadline_ns <= now_ns, self._questions.items())
            late = list(old)
        if late or now_ns - self._replaced_ns >= REPLACE_NS:
            self._replaced_ns = now_ns
            self._threads.replace_lost()
        for key, question in late:
            self._fail(
                key, question, Unavailable, f"has not answered within {ANSWER_SECONDS:g} s", self._threads.at_it
            )  # fmt: skip
        if self._has_version and now_ns - self._version_ns >= VERSION_NS:
            self._version_ns = now_ns
            self._read_version(now_ns)

    @property
    def threads_lost(self) -> int:
        """Threads whose question, or read of the version, has no answer in time."""
        return self._threads.lost + self._versions_late

    # ---------------------------------------------------------------- questions

    def _ask(self, key: _Key, is_first: bool) -> _Question:
        if self._threads.is_held_up(key.asker):
            raise self._held_up(key)
        if not is_first and not key.is_of_administrator:
            room = QUESTIONS_MAX - len(self._questions)
            if self._of_one[key.principal] >= min(room, QUESTIONS_OF_ONE_MAX):
                raise self._too_many()
        question = _Question(self._clock.monotonic_ns(), is_first)
        self._questions[key] = question
        self._of_one[key.principal] += 1
        self._send(key, question)
        return question

    def _too_many(self) -> Unavailable:
        return Unavailable(
            f"too many questions wait for the authorizer {self._name} just now; try again in a moment"
        )

    def _held_up(self, key: _Key) -> Unavailable:
        what = f"does not answer {LOST_OF_ONE_MAX} or more questions about {key.principal}"
        self._faults.warn(
            "the authorizer %s %s, which denies the others: %s",
            self._name,
            what,
            self._threads.at_it,
        )
        return Unavailable(
            f"the authorizer {self._name} {what}, and is asked no other until one of them ends; try again later, or "
            "see the broker's log"
        )

    def _bring_forward(self, key: _Key, question: _Question) -> None:
        """Let a question that waits for a thread be one of the first."""
        question.is_first = True
        if question.answer is not None and question.answer.cancel():
            self._send(key, question)

    def _send(self, key: _Key, question: _Question) -> None:
        try:
            answer = self._threads.ask(
                partial(_ask, self._inner, key), key.asker,
                is_first=question.is_first, is_urgent=key.is_of_administrator,
            )  # fmt: skip
        except RuntimeError as fault:  # no thread can be made
            text = f"cannot be asked: {fault}"
            self.in_loop(lambda: self._fail(key, question, Unavailable, text))
            return
        question.answer = answer
        answer.add_done_callback(
            lambda answer: self.in_loop(lambda: self._answered(key, question, answer))
        )

    def _wait(self, question: _Question, step: Callable[[], None]) -> None:
        with self._lock:
            if question.waiting is not None:
                question.waiting.append(step)
                return
        self.in_loop(step)

    def _answered(self, key: _Key, question: _Question, answer: Future[Outcome]) -> None:
        if question.answer is not answer or answer.cancelled():
            return  # it was asked again since, by other rules
        outcome = answer.result()
        error = outcome.error
        if error is None:
            ns = ANSWER_NS if key.resource is not None else SCOPES_NS
            self._end(key, question, outcome.found, None, ns)
        elif isinstance(error, PermissionDenied):
            self._end(key, question, None, PermissionDenied(said(error)), ANSWER_NS)
        else:
            # a fault of a network or a file may be over soon; Unavailable is one of these. Without scopes nothing is given
            # either way, and consumers of patterns wait for them
            may_end = isinstance(error, OSError) or key.resource is None
            kind = Unavailable if may_end else PermissionDenied
            self._fail(key, question, kind, "cannot decide", said(error, repr))

    def _fail(
        self, key: _Key, question: _Question, kind: type[DanubeError], what: str, why: str = ""
    ) -> None:
        """End a question without an answer."""
        self._faults.warn(
            "the authorizer %s %s, which denies%s", self._name, what, why and f": {why}"
        )
        if question.answer is not None:
            question.answer.cancel()
        advice = "try again, or see" if kind is Unavailable else "see"
        text = f"the authorizer {self._name} could not decide {key.question}: it {what}; {advice} the broker's log"
        self._end(key, question, None, kind(text), FAULT_NS)

    def _end(
        self, key: _Key, question: _Question, found: object, error: DanubeError | None, ns: int
    ) -> None:
        """Keep an answer for a while, and begin again what waits for it."""
        with self._lock:
            waiting, question.waiting = question.waiting, None
            if waiting is None:
                return
            del self._questions[key]
            self._of_one[key.principal] -= 1
            if not self._of_one[key.principal]:
                del self._of_one[key.principal]
            self._keep(key, _Answer(found, error, self._clock.monotonic_ns() + ns))
        for step in waiting:
            try:
                step()
            except Exception:  # the others go on
                _log.exception("what has waited for the authorizer %s failed", self._name)

    def _answers_like(self, key: _Key) -> dict[_Key, _Answer]:
        return self._scopes if key.resource is None else self._answers

    def _keep(self, key: _Key, answer: _Answer) -> None:
        self._forget(key)
        self._answers_like(key)[key] = answer
        self._scopes_kept += answer.weight if key.resource is None else 0
        if len(self._answers) > ANSWERS_MAX:
            self._forget(next(iter(self._answers)))
        while self._scopes_kept > SCOPES_KEPT_MAX:
            self._forget(next(iter(self._scopes)))

    def _forget(self, key: _Key) -> None:
        answer = self._answers_like(key).pop(key, None)
        if answer is not None and key.resource is None:
            self._scopes_kept -= answer.weight

    # ---------------------------------------------------------------- version

    def _read_version(self, now_ns: int) -> None:
        """Read it, again in another thread if one took too long."""
        if self._version is not None:
            self._version_faults.warn("the authorizer %s does not tell its version", self._name)
            if now_ns < self._version_until_ns or self._versions_late >= VERSIONS_LATE_MAX:
                return
        try:
            answer = self._version_threads.ask(lambda: int(getattr(self._inner, "version", 0)))
        except RuntimeError:  # no thread can be made
            return
        self._versions_late += self._version is not None
        self._version, self._version_until_ns = answer, now_ns + int(ANSWER_SECONDS * SECOND_NS)
        answer.add_done_callback(lambda answer: self.in_loop(lambda: self._take_version(answer)))

    def _take_version(self, answer: Future[Outcome]) -> None:
        """Forget what older rules have answered, and ask again what is under way."""
        if answer is not self._version:
            self._versions_late -= 1
            return  # it took too long, and was read again since
        self._version, outcome = None, answer.result()
        if outcome.error is not None:
            self._version_faults.warn(
                "the version of the authorizer %s cannot be read: %s",
                self._name, said(outcome.error, repr),
            )  # fmt: skip
            return
        if outcome.found == self.version:
            return
        self.version = outcome.found
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            for known in (*self._answers, *self._scopes):
                self._forget(known)
            for key, question in list(self._questions.items()):
                before, question.answer = question.answer, None
                if before is not None:
                    before.cancel()
                question.extend(now_ns)
                self._send(key, question)


def check_authorizer(text: str, auth: str) -> None:
    """Check the setting before anything begins; loads no package. Raises InvalidArgument for a name that no package has,
    FailedPrecondition in a broker that asks no one who they are."""
    if auth == "none":
        raise FailedPrecondition(
            "authorizer is set, and this broker asks no one who they are; serve it with --auth required"
        )
    _GROUP.check(text)


def load_authorizer(text: str, clock: Clock, start_timeout_ms: int) -> AskedAuthorizer | None:
    """Load the authorizer that the setting names; None if it names none. Raises InvalidArgument if it cannot be loaded,
    Unavailable if that takes too long."""
    if not text:
        return None
    return AskedAuthorizer(text.partition(":")[0], _GROUP.load(text, start_timeout_ms), clock)


def _ask(inner: Rules, key: _Key) -> LookupScopes | None:
    """Ask for a right, or for scopes. A right for which something is returned, False perhaps, is not permitted. Raises what
    the authorizer raises."""
    if key.resource is None:
        try:
            return LookupScopes(inner.lookup_scopes(key.principal))
        except PermissionDenied:
            return LookupScopes(())
    found: object = cast("Callable[..., object]", inner.authorize)(*key)
    if found is not None:
        # without the value, whose text a foreign package makes
        raise TypeError(f"it has returned {type(found).__name__}; it raises or returns None")
    return None
