"""The rights of principals, as one process of a secured broker knows them: its copy of the records, and how fresh it is.

    connection: proof (CURVE key, uid) --principal_of--> principal --permits--> handle

The coordinator owns the records. A process that was not told for `CONFIRMED_NS_MAX` that its copy is the newest one lets
no client in and opens nothing; what is open goes on. One that may not have heard yet of a sign-on does not refuse its key:
the client asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from danube_fast.clock import SECOND_NS, Clock
from danube_fast.errors import PermissionDenied, Unavailable
from danube_fast.security.authentication import Identity
from danube_fast.security.authorization import Authorizer
from danube_fast.security.authorizers import AskedAuthorizer
from danube_fast.security.changed_rights import Changes
from danube_fast.security.lookup_scopes import LookupScopes
from danube_fast.security.policy import Policy, PolicyAuthorizer
from danube_fast.security.records import BOOTSTRAP, Credential
from danube_fast.security.scopes import topic_fronts
from danube_fast.types import CLUSTER, REPLY_TOPICS, Permission
from danube_fast.undecided import Undecided
from danube_fast.visible import Visible, common
from danube_fast.workers.process.commands import OWN_SESSION

__all__ = ["CONFIRMED_NS_MAX", "OVERFLOW", "Access", "may_not_publish"]

CONFIRMED_NS_MAX = 30 * SECOND_NS
OVERFLOW = "uid:65534"
"""Every user of another user namespace looks like this one."""
SHOWN_MAX = 10_000
"""Sets of subjects whose names are kept."""
SETTLES_NS = 5 * SECOND_NS
"""So long a coordinator that has started again may not know all sign-ons that others know."""
_OF_OWNER = Permission.LOOKUP, Permission.CONSUME, Permission.MANAGE_TOPIC
"""What the principal that made a reply topic may do with it."""


def may_not_publish(setter: str, topic: str) -> PermissionDenied:
    """Make the error for dead letters of a failure policy whose setter may not publish to its topic."""
    if not setter:
        return PermissionDenied(
            f"no user is known to have chosen {topic} in the failure policy, which was set without auth, or by a version "
            "that did not keep who set it; let a user that may publish there set it again: danube-fast subscriptions "
            f"set-failure-policy TOPIC SUBSCRIPTION --dead-letter-topic {topic}"
        )
    return PermissionDenied(
        f"{setter}, who set the failure policy, may not publish to {topic}; bind a role, or let a user that may publish "
        "there set the policy again"
    )


class _Shown:
    """Names that roles, and the scopes of an authorizer, show to some subjects."""

    __slots__ = ("_by_roles", "fronts", "key", "scopes")

    def __init__(self, scopes: list[str]) -> None:
        self._by_roles = topic_fronts(scopes), hash(tuple(sorted(scopes)))
        self.take(None)

    def take(self, scopes: LookupScopes | None) -> None:
        """Go by these scopes of the authorizer, too; None: there is none."""
        self.scopes = scopes
        self.fronts, self.key = self._by_roles
        if scopes is not None:
            self.fronts, self.key = common(self.fronts, scopes.fronts), hash((self.key, scopes.key))


class Access(Authorizer):
    """The Authenticator and the Authorizer of a secured process. ZAP's thread asks `admits`, the loop all else.

    A question to the authorizer of another package is Undecided until it has answered.
    """

    def __init__(self, clock: Clock, outer: AskedAuthorizer | None = None) -> None:
        """`outer`: of another package; it can take away what roles allow."""
        self._outer = outer
        self.policy = Policy()
        self._authorizer = PolicyAuthorizer(self.policy)
        self.clock = clock
        self._confirmed_ns = -CONFIRMED_NS_MAX
        self.has_heard: Callable[[], bool] = lambda: True
        """Whether the copy has all that was said before this process ran on, if it was stopped or held up."""
        self.is_loaded = False
        """Whether the copy was ever whole."""
        self.loads = 0
        """How often it was read whole."""
        self.owner_of: Callable[[str], str | None] = lambda topic: None
        """Finds the principal that made a reply topic."""
        self._shown: dict[tuple[str, ...], _Shown] = {}
        """By subjects of bindings."""
        self._shown_version = (0, 0)
        self._settles_ns = 0
        """Until then there may be sign-ons that are not known here yet."""
        self.is_owner = False
        """Whether this is the coordinator's: the key that a broker begins with is good there only."""

    def confirm(self) -> None:
        """Note that the copy is the newest one now."""
        self._confirmed_ns = self.clock.monotonic_ns()

    def begin_again(self) -> None:
        """Note that the coordinator has started again: others know sign-ons that it hears of in a moment."""
        self._settles_ns = self.clock.monotonic_ns() + SETTLES_NS

    def settle(self) -> None:
        """Note that all sign-ons are known here that others knew."""
        self._settles_ns = 0

    @property
    def is_settling(self) -> bool:
        """Whether there may be sign-ons that are not known here yet."""
        return self.clock.monotonic_ns() < self._settles_ns

    @property
    def is_fresh(self) -> bool:
        """Whether the copy may be relied upon."""
        age_ns = self.clock.monotonic_ns() - self._confirmed_ns
        return self.is_loaded and age_ns < CONFIRMED_NS_MAX

    @property
    def version(self) -> tuple[int, int, int]:
        """Which rights there are: another one after each change; a new sign-on changes none."""
        return (
            self.policy.changes.count,
            self.loads,
            0 if self._outer is None else self._outer.version,
        )

    def take_changed(self, since: tuple[int, int, int]) -> Changes | None:
        """Return whose rights may be others than in that version, where they were taken last; None: all of everyone."""
        taken, version = self.policy.changes.take(), self.version
        if since == version:
            return Changes()
        # rules of another package may say anything about anyone
        return None if self._outer is not None or since[1:] != version[1:] else taken

    def changed_fronts(self, principal: str, changed: Changes | None) -> tuple[str, ...]:
        """Return how the names of topics begin where rights of a principal may have changed; empty: nowhere."""
        if changed is None:
            return ("",)
        fronts = changed.fronts.get(f"user:{principal}", ())
        if changed.has_groups:
            for subject in self.policy.subjects_of(principal) or ():
                fronts = *fronts, *changed.fronts.get(subject, ())
        return tuple(fronts)

    def admits(self, proof: str) -> bool:
        """Whether a connection with that proof may be made; HELLO asks again. Raises Unavailable."""
        if not self.is_fresh:
            raise self._not_known()
        if self.principal_of(proof) is not None:
            return True
        self._check_hears(proof)
        return False

    def principal_of(self, proof: str) -> str | None:
        """Return the principal whom the proof names now; None: it names no one (any more)."""
        if proof == OVERFLOW:
            return None
        principal = self.policy.principal_of(proof, self.clock.wall_ns())
        return None if principal == BOOTSTRAP and not self.is_owner else principal

    def registered_to(self, proof: str) -> str:
        """Return to whom a proof belongs that may have ended, or whose principal is disabled; empty: to no one."""
        record = self.policy.get(f"credential/{proof}")
        return record.principal if isinstance(record, Credential) else ""

    def authenticate(self, claims: Mapping[str, Any], proof: str = "") -> str:
        """Return the principal of a connection; claims prove nothing. Raises PermissionDenied, Unavailable."""
        self._check_fresh()
        if not proof:
            raise Unavailable("what this connection proves was not read; say HELLO again")
        principal = self.principal_of(proof)
        if principal is None:
            self._check_hears(proof)
            kind, _, number = proof.partition(":")
            who = f"local user {number}" if kind == "uid" else "this key"
            raise PermissionDenied(
                f"{who} is not registered with this broker, or not any more; an administrator registers it with: "
                "danube-fast security keys add; a client that came in by a sign-on has to sign on again"
            )
        key = claims.get("key")
        if proof.startswith("uid:") and isinstance(key, str):
            self._check_same(principal, proof, f"curve:{key}")
        return Identity(principal, proof)

    def _check_same(self, principal: str, proof: str, key: str) -> None:
        """Raise PermissionDenied for a client whose key would give it other rights than its local user: it would act as
        another principal here than elsewhere."""
        claimed = self.policy.sign_ons.get(key)
        if claimed is None:
            self._check_hears(key)
        if self.principal_of(key) != principal or (claimed is not None and claimed.groups):
            user = proof.partition(":")[2]
            raise PermissionDenied(
                f"local user {user} is {principal} here, and the key or token of this client belongs to another user, or brings groups: "
                "use transport='tcp', or register the local user for the same principal"
            )

    def authorize(self, principal: str, permission: Permission, resource: str) -> None:
        """Return if the principal may do that. Raises PermissionDenied, Unavailable, Undecided."""
        if resource == OWN_SESSION:  # what was opened was authorized then
            return
        self._check_fresh()
        self.check(principal, permission, resource)

    def visible_to(self, principal: str) -> Visible:
        """Return what lists show to the principal: what its roles show, within the scopes that the authorizer of another
        package gives. Raises Unavailable, Undecided, whatever there is to show."""
        self._check_fresh()
        scopes = None
        if self._outer is not None and principal != BOOTSTRAP:
            scopes = self._outer.lookup_scopes(principal)
        shown = self._shown_to(principal)
        if shown.scopes is not scopes:
            shown.take(scopes)

        def shows(resource: str) -> bool:
            of_reply = self._permits_reply(principal, Permission.LOOKUP, resource)
            if of_reply is not None:
                return of_reply
            is_given = self.policy.permits(principal, Permission.LOOKUP, resource)
            return is_given and (scopes is None or scopes.cover(resource))

        return Visible(shows, shown.fronts, shown.key)

    def _shown_to(self, principal: str) -> _Shown:
        """Return what roles show, which is kept until rights change: each change of a topic is a look at all who watch."""
        version = self.policy.changes.count, self.loads
        if version != self._shown_version or len(self._shown) >= SHOWN_MAX:
            self._shown_version, self._shown = version, {}
        subjects = self.policy.subjects_of(principal) or ()
        found = self._shown.get(subjects)
        if found is None:
            scopes = self.policy.scopes_of(subjects, Permission.LOOKUP)
            found = self._shown[subjects] = _Shown(scopes)
        return found

    def permits(self, principal: str, permission: Permission, resource: str) -> bool:
        """Whether the principal may do that, by the copy as it is. Raises Undecided."""
        try:
            self.check(principal, permission, resource)
        except Undecided:
            raise
        except (PermissionDenied, Unavailable):
            return False
        return True

    @property
    def has_outer(self) -> bool:
        """Whether the authorizer of another package is asked, too."""
        return self._outer is not None

    @property
    def threads_lost(self) -> int:
        """Threads that the authorizer of another package has not answered in time."""
        return 0 if self._outer is None else self._outer.threads_lost

    def check(
        self, principal: str, permission: Permission, resource: str, *, is_open: bool = False, outer: bool = True,
    ) -> None:  # fmt: skip
        """Return if the principal may do that, by the copy as it is. Raises PermissionDenied, Undecided; Unavailable if the
        authorizer of another package does not decide. What `is_open` is asked about before what shall be. Without `outer`
        that authorizer is not asked, so that nothing is Undecided."""
        of_reply = self._permits_reply(principal, permission, resource)
        if of_reply is None:
            self._authorizer.authorize(principal, permission, resource)
            if outer and self._outer is not None and principal != BOOTSTRAP:
                self._outer.authorize(principal, permission, resource, is_first=is_open)
        elif not of_reply:
            raise PermissionDenied(
                f"{principal} may not {permission} {resource}: only the client that made a reply topic reads it"
            )

    def rules(self, principal: str) -> bool:
        """Whether roles let the principal manage the cluster."""
        try:
            self.check(principal, Permission.MANAGE_CLUSTER, CLUSTER, outer=False)
        except PermissionDenied:
            return False
        return True

    def serve_from(self, in_loop: Callable[[Callable[[], None]], None]) -> None:
        """Let the loop go on with what waits for another package's authorizer; `in_loop` hands it work."""
        if self._outer is not None:
            self._outer.in_loop = in_loop

    def do_work(self, now_ns: int) -> None:
        """Look after questions that wait, in the loop."""
        if self._outer is not None:
            self._outer.do_work(now_ns)

    def _permits_reply(self, principal: str, permission: Permission, resource: str) -> bool | None:
        """Whether a principal may do that with a reply topic; None: roles decide.

        Its name is drawn at random and told in requests alone: that a client knows it is the right to publish there,
        and to nothing else.
        """
        if not resource.startswith(REPLY_TOPICS):
            return None
        if permission is Permission.PRODUCE:
            return True
        topic = resource.partition("#")[0]
        if self.owner_of(topic) == principal:
            return permission in _OF_OWNER
        return False if permission is Permission.CONSUME else None

    def _check_fresh(self) -> None:
        if not self.is_fresh or not self.has_heard():
            raise self._not_known()

    def _check_hears(self, proof: str) -> None:
        """Raise Unavailable for a proof that is not known here, and may be known elsewhere."""
        if not self.has_heard():
            raise self._not_known()
        is_key = proof.startswith("curve:") and not self.registered_to(proof)
        if is_key and self.is_settling:
            raise Unavailable(
                "this process has not heard of all sign-ons since the coordinator has started again; try again"
            )

    @staticmethod
    def _not_known() -> Unavailable:
        return Unavailable(
            "this process has not heard for a while who may do what, and opens nothing meanwhile; try again"
        )
