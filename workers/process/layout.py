"""Names in the data directory that more than one process uses; light to import."""

from __future__ import annotations

__all__ = ["BOOTSTRAP_KEY", "METADATA", "METADATA_SEAL", "SERVER_KEY"]

SERVER_KEY = "server.key"
"""File with the CURVE key pair of a secured broker."""
BOOTSTRAP_KEY = "bootstrap-admin.key"
"""File with the key of an administrator that a secured broker begins with, until its first use."""

METADATA = "metadata"
"""Folder of the metadata."""
METADATA_SEAL = "metadata.seal"
"""File that says which metadata belongs here."""
