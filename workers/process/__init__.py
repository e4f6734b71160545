"""What every process of a broker has: its start, its mailbox, its log lines, where it sleeps."""
