"""Self-test that exchanges messages with real workers, without a daemon. Imports neither `host` nor the checks."""
