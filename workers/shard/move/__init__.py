"""Partitions that move to another worker."""
