"""Reports of workers to the coordinator: each is a message and its two ends."""
