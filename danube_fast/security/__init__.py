"""Authentication and authorization: who connects, and who may do what."""

from danube_fast.security.authentication import Authenticator, TrustClaims
from danube_fast.security.authorization import AllowAll, Authorizer, Permission

__all__ = ["AllowAll", "Authenticator", "Authorizer", "Permission", "TrustClaims"]
