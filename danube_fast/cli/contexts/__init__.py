"""Brokers under names: which one a command asks, and how it proves itself there."""
