"""The load-test harness behind `danube-fast bench`, and the pytest-benchmark suites beside it."""
