"""The client API: connections, authorization, request handlers, replies, and memory limits for clients.

The package passes requests to `models`. It may import `models` and the packages below; it reaches the daemon as a whole
only through interfaces that the daemon passes in.
"""
