"""danube-fast: a publish/subscribe message broker for one big host."""

__version__ = "0.1.0"
