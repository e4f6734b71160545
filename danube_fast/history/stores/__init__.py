"""Object stores: one interface, and a home of it for each kind of store."""
