"""What the operating system gives: processes, descriptors, sockets, times, directories, memory, the log.

Knows nothing of models, requests, clients or children, and imports nothing of the daemon.
"""
