"""The way of a message to its consumers."""
