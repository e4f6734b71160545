"""Connections to the broker, and the threads that share them."""
