"""The client: producers, consumers, readers, administration, for threads and for event loops."""
