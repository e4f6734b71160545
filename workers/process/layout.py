"""Names in the data directory that more than one process uses; light to import."""

from __future__ import annotations

__all__ = ["METADATA", "METADATA_SEAL"]

METADATA = "metadata"
"""Folder of the metadata."""
METADATA_SEAL = "metadata.seal"
"""File that says which metadata belongs here."""
