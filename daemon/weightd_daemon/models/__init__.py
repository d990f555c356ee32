"""The served models: for each model, the generation that serves on each device, and the files that it has loaded.

This package connects models, generations, requests and child processes. It opens no sockets, and it starts processes
only through the package `processes`. It may import `processes`, `scheduling`, `generations` and the packages in lower
layers.
"""
