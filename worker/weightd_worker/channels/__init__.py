"""Direct channels in a worker: which channel it reads next, its row of shared memory, and the life of a request.

The docstring of `weightd_daemon.channels` describes the design.
"""
