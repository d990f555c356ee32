"""Read-only view of a running daemon: status, metrics, events and logs. These modules change nothing.

May import `models` and the packages below it. The state of clients appears in numbers only.
"""
