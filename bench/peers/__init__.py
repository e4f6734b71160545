"""Other systems under the same load: `danube-fast bench --peers`."""
