"""Access to the operating system: processes, descriptors, sockets, timers, directories, memory and the log.

These modules know no models, requests, clients or children, and import nothing else of the daemon.
"""
