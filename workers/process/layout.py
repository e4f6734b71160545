"""Names in the data directory that more than one process uses; light to import."""

from __future__ import annotations

__all__ = ["AUDIT", "BOOTSTRAP_KEY", "METADATA", "METADATA_SEAL", "RECOVER_ADMIN"]

BOOTSTRAP_KEY = "bootstrap-admin.key"
"""File with the key of an administrator that a secured broker begins with, until its first use."""
RECOVER_ADMIN = "recover-admin"
"""File with the public key of `BOOTSTRAP_KEY`: the next start takes that key although there is an administrator."""

AUDIT = "audit"
"""Folder of the audit log."""
METADATA = "metadata"
"""Folder of the metadata."""
METADATA_SEAL = "metadata.seal"
"""File that says which metadata belongs here."""
