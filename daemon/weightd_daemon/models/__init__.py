"""The served models: which generation of a model serves on each device, and which files that generation has loaded.

This package connects models, generations, requests and child processes. It opens no sockets, and it starts processes
only through the package `processes`. It may import `processes`, `scheduling`, `generations` and the packages in lower
layers.
"""
