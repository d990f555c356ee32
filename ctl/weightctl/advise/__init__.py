"""`weightctl advise`: whether it pays that the daemon runs requests of a model together.

`rounds` says what is asked in which order, `measure` asks, `comparison` compares, `recommend` judges, `render` tells.
"""
