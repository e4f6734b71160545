"""Storage of a worker: retention, trimming, compaction, snapshots, limits."""
