"""The admin port: health, readiness, metrics. Import what you need; its libraries load slowly."""
