"""Replays: what a topic or a table had, published to a topic, at full speed or at a pace."""
