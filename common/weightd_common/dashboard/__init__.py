"""Data of `weightctl top` and the gateway's status page, computed from the daemon's metrics and status."""
