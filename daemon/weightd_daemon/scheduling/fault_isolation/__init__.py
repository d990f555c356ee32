"""Whose fault it is when slots die or hang: contents and clients that are kept from the next slot.

Here is what decides of blame, fed with ends and the clock; who runs what is the scheduler's business. It may import
`scheduling` beside it, and what is below.
"""
