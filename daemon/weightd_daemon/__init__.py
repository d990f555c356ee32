"""The daemon: starts holders and workers, watches them, and routes requests to them.

The daemon imports no engine and uses no card, so that neither can crash or block the daemon. It forwards the bytes of
tensors without interpreting them.
"""
