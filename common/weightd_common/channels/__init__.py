"""Direct channels: the pages that the daemon and the workers share, and the messages about channels.

The docstring of `weightd_daemon.channels` describes the design.
"""
