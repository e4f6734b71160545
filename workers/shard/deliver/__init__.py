"""Delivery of messages to consumers, from the partition to the session."""
