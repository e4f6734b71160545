"""Commands over the security of a broker: who may do what, keys and tokens, its own key, the audit log."""
