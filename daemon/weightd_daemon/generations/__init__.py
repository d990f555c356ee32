"""Generations: numbered copies of a model's weights, each with its processes.

The classes of this package perform no I/O. The daemon passes events and the time to them, and performs the actions that
they request.
"""
