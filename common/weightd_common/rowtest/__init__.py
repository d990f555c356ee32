"""Test of whether a model's requests may be batched, used by the workers and by `weightctl advise`.

It needs numpy and a function that runs the model, but no engine.
"""
