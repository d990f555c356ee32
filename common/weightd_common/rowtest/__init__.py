"""The test of whether requests may be batched: the daemon's workers and `weightctl advise` run the same one.

It needs numpy and a function that runs the model, but no engine.
"""
