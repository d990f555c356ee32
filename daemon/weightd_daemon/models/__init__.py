"""The served models: which generation of each serves on which device, and from which files it was loaded.

This package connects models, generations, requests and child processes. It opens no sockets, and it starts processes
only through `processes`. It may import `processes`, `scheduling`, `generations` and the packages below them.
"""
