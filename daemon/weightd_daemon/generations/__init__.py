"""Generations: numbered copies of a model's weights, each with its processes.

The classes of this package perform no I/O. The daemon passes them events and the time, and performs the actions that
they request.
"""
