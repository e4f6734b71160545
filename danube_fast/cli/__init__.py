"""The command line: thin commands over the client, the supervisor and the log's inspector."""
