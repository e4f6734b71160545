"""Sign-on: a token goes once, over verified HTTPS, and brings what the client needs to come in by CURVE."""
