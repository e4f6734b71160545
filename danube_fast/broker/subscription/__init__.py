"""One subscription: who gets which message, and when again."""
