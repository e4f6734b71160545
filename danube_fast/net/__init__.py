"""The wire: protocol, server socket, sessions."""
