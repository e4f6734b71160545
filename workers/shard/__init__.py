"""A shard worker: its loop, its partitions, its operations."""
