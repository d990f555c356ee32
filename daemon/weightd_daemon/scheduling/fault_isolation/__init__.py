"""Fault isolation: finds the requests and clients that crash or hang slots, and keeps them from other slots.

The modules of this package decide from process exits and the time; the scheduler runs the requests. This package may
import the other modules of `scheduling`, and the packages that `scheduling` may import.
"""
