"""What the operating system gives: processes, descriptors, sockets, memory, the log.

Knows nothing of models or requests.
"""
