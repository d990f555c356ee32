"""Row test: whether a model gives the same answers to batched requests. Used by workers and by `weightctl advise`.

The test needs numpy and a function that runs the model, but imports no engine.
"""
