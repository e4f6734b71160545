"""The processes of `danube-fast serve`: one role per file, introduced to each other only here."""
