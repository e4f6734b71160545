"""The way of a published message into the log."""
