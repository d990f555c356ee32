"""The daemon: starts holders and workers, watches them, and routes requests to them.

It imports no engine and uses no card, so that none of these can crash or block it. It forwards the bytes of tensors
without interpreting them.
"""
