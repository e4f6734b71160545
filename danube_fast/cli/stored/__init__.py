"""Commands over what is stored: files of the log, history in an object store, topics as tables."""
