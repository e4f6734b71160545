"""Handlers that are called for each message; requests and replies."""
