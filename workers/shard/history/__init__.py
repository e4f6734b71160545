"""History of a worker's partitions: what the uploader may take, and what it fetches back."""
