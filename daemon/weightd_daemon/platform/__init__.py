"""Access to the operating system: processes, descriptors, sockets, timers, directories, memory and the log.

These modules do not depend on models, requests or the state of clients, and import no other package of the daemon.
"""
