"""Parts that all processes of a broker have: start, mailbox, log lines, sleep."""
