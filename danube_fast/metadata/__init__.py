"""The broker's metadata: topics, subscriptions and owners, and the stores that keep them."""
