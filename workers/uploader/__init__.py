"""The uploader: sends closed history to an object store, and fetches it back for workers."""
