"""Who may do what."""

from danube_fast.security.authorization import Permission, authorize

__all__ = ["Permission", "authorize"]
