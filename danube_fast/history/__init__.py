"""History: what has left the log, as immutable objects in an object store."""
