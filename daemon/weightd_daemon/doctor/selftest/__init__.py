"""Self-test with real workers, driven through their protocol without a daemon. Imports neither `host` nor checks."""
