"""Publishing: from the client's bundle into the log."""
