"""State machines and operations of the broker: partitions, subscriptions, topics. IO-free."""
