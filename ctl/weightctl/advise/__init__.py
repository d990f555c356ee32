"""`weightctl advise`: whether it pays that the daemon runs requests of a model together.

`measure` asks, `recommend` compares and judges, `render` prints.
"""
