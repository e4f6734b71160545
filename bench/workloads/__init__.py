"""The workloads of `danube-fast bench`, and the table of them."""
