"""A shard worker: its loop, its partitions, and what it is told to do."""
