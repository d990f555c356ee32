"""Read-only view of a running daemon: status, metrics, events and logs.

The modules of this package do not change the daemon's state. They may import `models` and the packages in lower layers,
but not `api`. About clients they report only numbers.
"""
