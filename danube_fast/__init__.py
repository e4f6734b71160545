"""danube-fast: a publish/subscribe message broker for one big host."""
