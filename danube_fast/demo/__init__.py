"""`danube-fast demo`: a real data set through a real broker, with a kill on the way. See scenario.py."""
