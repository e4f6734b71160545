"""The state of each message of a subscription, by the page."""
